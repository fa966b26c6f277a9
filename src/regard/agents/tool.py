"""A tool: a function with a name, a description and a JSON schema of its arguments, which a model may call.

    Toolbox([calculator(), …]).run("calculator", {"expression": "2 + 2"})        "4"

A result is text for the model. What goes wrong in a call is text for the model too (`ToolFailure`), so that it can call
again. A toolbox runs the tools that it has and no others, with arguments that are valid for their schemas.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.agents.arguments import violation

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class ToolFailure(ValueError):
    """A call that failed, with a message for the model."""


@dataclass(frozen=True)
class AgentTool:
    name: str
    description: str
    parameters: Mapping[str, Any]  # the JSON schema of the arguments, of type object
    run: Callable[[dict[str, Any]], str] = field(compare=False)  # raises ToolFailure

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a tool; use at most 64 of a-z, A-Z, 0-9, _ and -")

    def for_template(self) -> dict[str, Any]:
        """In OpenAI's format, as chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def text_arguments(**described: str) -> dict[str, Any]:
    """The schema of arguments that are strings, all of them required; each with its description."""
    properties = {name: {"type": "string", "description": text} for name, text in described.items()}
    return {"type": "object", "properties": properties, "required": list(described), "additionalProperties": False}


class Toolbox:
    """The tools that a model may call."""

    def __init__(self, tools: Iterable[AgentTool]):
        self.tools: dict[str, AgentTool] = {}
        for tool in tools:
            if tool.name in self.tools:
                raise ValueError(f"two tools have the name {tool.name!r}; leave one out")
            self.tools[tool.name] = tool

    @property
    def names(self) -> list[str]:
        return list(self.tools)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {name: tool.parameters for name, tool in self.tools.items()}

    def for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tools.values()]

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """The result of a call. ToolFailure if there is no such tool, its arguments are invalid, or it raises one."""
        tool = self.tools.get(name)
        if tool is None:
            raise ToolFailure(f"there is no tool {name!r}; the tools are {', '.join(self.names)}")
        try:
            wrong = violation(arguments, tool.parameters)
        except (re.error, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # a schema that is not one, from a server
            raise ToolFailure(f"{name} cannot be called: its schema is invalid ({error})") from error
        if wrong is not None:
            raise ToolFailure(f"the arguments of {name} are invalid: {wrong}")
        return tool.run(arguments)
