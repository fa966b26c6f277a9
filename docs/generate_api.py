"""Write docs/api.md from the docstrings of the public names: `python docs/generate_api.py`."""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from itertools import takewhile
from pathlib import Path
from types import FunctionType

import regard
from regard.kinds import TABLES
from regard.spec import Spec

PAGE = Path(__file__).parent / "api.md"
INTRODUCTION = """# API reference

Everything here is imported from `regard`, for example `from regard import Decoder`. Specs list their fields with their
defaults; in JSON and TOML a spec is a table with its `kind`. `python docs/generate_api.py` writes this page.
"""
SECTIONS = {  # heading: modules
    "Load and use models": ("regard.load_model", "regard.language_model", "regard.checkpoint", "regard.text"),
    "Generate": ("regard.engine",),
    "Train": ("regard.training", "regard.training_run", "regard.objectives", "regard.data"),
    "Adapt": ("regard.adapt",),
    "Number formats": ("regard.formats",),
    "Plan and verify": ("regard.planning", "regard.verification"),
    "Look inside": ("regard.lens",),
    "Models": ("regard.models",),
    "Positions": ("regard.parts.position",),
    "Masks": ("regard.kernels",),
    "Parts": ("regard.parts",),
    "Layout and specs": ("regard.layout", "regard.spec"),
}


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    names: dict[str, list[str]] = {heading: [] for heading in SECTIONS}
    for name in regard.__all__:
        if not name.startswith("__"):
            names[section_of(getattr(regard, name))].append(name)
    parts = [INTRODUCTION]
    for heading, section_names in names.items():
        parts.append(f"## {heading}\n")
        parts += [entry(name, getattr(regard, name)) for name in sorted(section_names, key=str.lower)]
    return "\n".join(parts)


def section_of(value: object) -> str:
    module = getattr(value, "__module__", None) or type(value).__module__
    module = "regard.parts.state" if module == "typing" else module
    candidates = [
        (len(package), heading)
        for heading, packages in SECTIONS.items()
        for package in packages
        if is_inside(module, package)
    ]
    assert candidates, f"{value!r} of {module} has no section; add its module to SECTIONS"
    return max(candidates)[1]  # the most specific package


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def entry(name: str, value: object) -> str:
    lines = [f"### `{name}`\n"]
    if isinstance(value, type) and issubclass(value, Spec) and dataclasses.is_dataclass(value):
        table = TABLES[value.kind_table]
        kinds = [kind for kind, path in table.items() if path == f"{value.__module__}:{value.__qualname__}"]
        lines += [f"Spec of kind `{kinds[0]}`.\n"] if kinds else []
        lines += [description(value), fields(value)]
    elif isinstance(value, type) and issubclass(value, Exception):
        lines += [description(value)]
    elif isinstance(value, type):
        lines += [signature(name, value), description(value), methods(value)]
    elif isinstance(value, FunctionType):
        lines += [signature(name, value), description(value)]
    else:
        lines += [description(type(value))]
    return "\n".join(line for line in lines if line) + "\n"


def signature(name: str, value: object) -> str:
    full_signature = inspect.signature(value)  # type: ignore[arg-type]
    public = [parameter for parameter in full_signature.parameters.values() if not parameter.name.startswith("_")]
    text = f"{name}{full_signature.replace(parameters=public)}"
    text = re.sub(r"<factory>|<function \w+ at 0x\w+>", "…", without_modules(text))
    return f"```text\n{textwrap.fill(text, 110, subsequent_indent='    ')}\n```\n"


def description(value: object) -> str:
    """The docstring; for a class without one the first two paragraphs of its module's, and the equations that follow
    them."""
    docstring = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    generated = docstring is None or docstring.startswith(f"{getattr(value, '__name__', '')}(")
    if not generated and docstring:
        return reflow(docstring)
    module = sys.modules[value.__module__].__doc__ if isinstance(value, type) else None
    paragraphs = (module or "").rstrip().split("\n\n")
    following = takewhile(lambda paragraph: paragraph.startswith("    "), paragraphs[2:])
    return reflow("\n\n".join([*paragraphs[:2], *following]), clean=False)


def reflow(text: str, clean: bool = True) -> str:
    """A docstring as Markdown: indented lines (equations, examples) become code."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text) if clean else text)
    converted = [
        f"```text\n{textwrap.dedent(p)}\n```" if p.startswith("    ") else p.replace("<", "&lt;") for p in paragraphs
    ]
    return "\n\n".join(converted) + "\n"


def fields(cls: type) -> str:
    """A table of the spec's fields, with the comments on their lines in the source."""
    comments = field_comments(cls)
    rows = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kind = str(field.type).replace("|", "\\|") if isinstance(field.type, str) else type_name(field.type)
        default = "required" if field.default is dataclasses.MISSING else f"`{default_of(field.default)}`"
        rows.append(
            f"| `{field.name}` | `{kind}` | {default} | {comments.get(field.name, '').replace('|', chr(92) + '|')} |"
        )
    head = ["| field | type | default | |", "| --- | --- | --- | --- |"]
    return "\n".join(head + rows) + "\n" if rows else ""


def default_of(value: object) -> str:
    return re.sub(r"\(.*\)", "()", repr(value)).replace("|", "\\|") if isinstance(value, Spec) else repr(value)


def type_name(hint: object) -> str:
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    return without_modules(text).replace("NoneType", "None").replace("|", "\\|")


def without_modules(text: str) -> str:
    return re.sub(r"\b(?:[a-z_0-9]+\.)+(?=[A-Za-z])", "", text)


def field_comments(cls: type) -> dict[str, str]:
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not (dataclasses.is_dataclass(base) and base.__module__.startswith("regard")):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _, _, comment = lines[node.end_lineno - 1].partition("  # ")  # type: ignore[operator]
                comments[node.target.id] = comment.strip()
    return comments


def methods(cls: type) -> str:
    lines = []
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not isinstance(function, FunctionType) or not function.__doc__:
            continue
        first = inspect.cleandoc(function.__doc__).split("\n\n")[0].replace("\n", " ").replace("<", "&lt;")
        lines.append(f"- `{name}`: {first}")
    return "\n".join(lines) + "\n" if lines else ""


if __name__ == "__main__":
    main()
