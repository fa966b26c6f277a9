"""The search tool: excerpts of documents from an index (regard/retrieval), each with its source.

    search("Who repairs the pump?")

    <source id="1" place="farm.md, lines 7 to 9" section="The farm > Machines">
    It is repaired by Mister Jensen on Fridays.
    </source>

The model can cite the place. An excerpt cannot close its element, nor open another.
"""

from collections.abc import Callable

from regard.agents.tool import AgentTool, ToolFailure, text_arguments
from regard.retrieval.document_index import DocumentIndex, Hit
from regard.retrieval.search import SearchMethod, search
from regard.retrieval.sources import choose_sources
from regard.retrieval.update_index import Embed

EXCERPTS = 3  # of one search
MAX_CHARACTERS = 3000  # of all of them


def search_tool(
    index: DocumentIndex,
    embed: Embed,
    method: SearchMethod = "hybrid",
    show_path: Callable[[str], str] = str,
) -> AgentTool:
    """embed: of the model that made the index. show_path: a path as the model reads it, such as relative to a folder.

    A search that finds nothing says so; the model may search for other words.
    """

    def run(arguments: dict[str, str]) -> str:
        if not arguments["query"].strip():
            raise ToolFailure("the query is empty; ask for something")
        return excerpts(search(index, arguments["query"], embed, EXCERPTS, method), show_path)

    return AgentTool(
        "search",
        "Finds excerpts of documents that answer a question, each with its source.",
        text_arguments(query="A question, or words to look for"),
        run,
    )


def excerpts(hits: list[Hit], show_path: Callable[[str], str]) -> str:
    sources = choose_sources([hit._replace(path=show_path(hit.path)) for hit in hits], len, MAX_CHARACTERS)
    return "".join(source.prompt for source in sources).strip() or "(nothing was found)"
