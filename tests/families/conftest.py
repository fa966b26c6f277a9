"""The decoders: pairs of theirs and ours, made once."""

import pytest

from tests.families.cases import classic, decoders, experts, gpt2, llama, params, recurrent
from tests.families.pairs import Pair, make

DECODERS = llama.CASES | gpt2.CASES | classic.CASES | decoders.CASES | experts.CASES | recurrent.CASES


@pytest.fixture(scope="session", params=params(DECODERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(request.param, tmp_path_factory.mktemp("theirs"))
