"""The files of the page: their weight, what they may not contain, and where the copied libraries come from."""

import re

import pytest

from regard.server.app import WEB

SERVED = sorted(path for path in WEB.rglob("*") if path.suffix in {".html", ".js", ".css", ".svg", ".json"})
OWN = [path for path in SERVED if "vendor" not in path.relative_to(WEB).parts]
PARSES_HTML = re.compile(  # also in other cases: Preact's property is dangerouslySetInnerHTML
    r"(?i)innerHTML|outerHTML|insertAdjacentHTML|setHTML|srcdoc|createContextualFragment|document\.write|DOMParser"
    r"|\beval\(|new Function\("
)


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=[str(path.relative_to(WEB)) for path in paths])


def test_the_page_weighs_less_than_600_kilobytes():
    weights = {str(path.relative_to(WEB)): path.stat().st_size for path in SERVED}
    assert sum(weights.values()) < 600_000, weights


@named([path for path in OWN if path.suffix == ".js"])
def test_no_script_parses_text_as_html(path):
    assert not PARSES_HTML.search(path.read_text())


@named(OWN)
def test_no_file_names_another_host(path):
    text = path.read_text().replace("http://www.w3.org/", "")  # names of SVG and MathML, not addresses
    assert not re.search(r"https?://\w|url\(\s*[\"']?//", text)


@named([path for path in OWN if path.suffix == ".js"])
def test_a_module_is_short_and_imports_what_exists(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    for target in re.findall(r"""(?:from|import)\s+"(\.[^"]+)";""", text):
        assert (path.parent / target).resolve().is_file(), target


@pytest.mark.parametrize("text", ["dangerouslySetInnerHTML=${x}", "part.setHTMLUnsafe(x)", "<iframe srcdoc=${x}>"])
def test_ways_to_parse_html_are_found(text):
    assert PARSES_HTML.search(text)


def test_every_copied_library_is_listed_with_its_licence():
    listed = (WEB / "vendor" / "README.md").read_text()
    for path in (WEB / "vendor").glob("*.*"):
        assert path.name == "README.md" or f"`{path.name}`" in listed
    packages = re.findall(r"\| (@?[\w/-]+) \d+\.\d+\.\d+ \|", listed)
    assert len(packages) == len(list((WEB / "vendor" / "licences").iterdir())) == 5
