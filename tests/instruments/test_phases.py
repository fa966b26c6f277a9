"""The phases of a pipeline: the numbers of its results.json, the newest one of a folder, and files that are not one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from regard.instruments import INSTRUMENTS
from regard.instruments.measurements import FOLDER, MAX_BYTES, newest_files
from regard.instruments.phases import EXAMPLE, NEWEST, read_results

SHIPPED = json.loads((FOLDER / "assistant.json").read_text(encoding="utf-8"))
PHASES = INSTRUMENTS["phases"]


def panels(**options: Any) -> dict[str, Any]:
    runs = options.pop("runs", None)
    return {f"{panel['kind']} {i}": panel for i, panel in enumerate(PHASES.panels(options, runs=runs))}


def items(panel: dict[str, Any]) -> dict[str, Any]:
    return {item["label"]: item["value"] for item in panel["items"]}


def pipeline(*flops: float, **more: Any) -> dict[str, Any]:
    phases = [
        {"phase": f"p{i}", "from": f"p{i - 1}" if i else None, "tokens": 10, "flops": count, "seconds": 1.0}
        for i, count in enumerate(flops)
    ]
    return {"pipeline": "mine", "seeds": [0], "phases": phases} | more


def write(path: Path, content: Any, time: int) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    os.utime(path, (time, time))


@pytest.mark.ledger("fig.5.31")
@pytest.mark.parametrize("i", range(len(SHIPPED["phases"])))
def test_the_numbers_are_those_of_the_measured_pipeline(i: int) -> None:
    found, phase = panels(phase=i + 1, results=EXAMPLE), SHIPPED["phases"][i]
    total = sum(entry["flops"]["mean"] for entry in SHIPPED["phases"])
    shares = found["bars 1"]
    assert shares["selected"] == i and shares["labels"][i] == phase["phase"]
    assert shares["values"][i] == pytest.approx(100 * phase["flops"]["mean"] / total, rel=1e-5)
    assert sum(shares["values"]) == pytest.approx(100) and "illustration" in shares["title"]
    row = dict(zip(found["table 4"]["columns"], found["table 4"]["rows"][i], strict=True))
    assert row["phase"] == phase["phase"] and row["share"] == f"{shares['values'][i]:.1f}\N{NO-BREAK SPACE}%"
    details = items(found["numbers 2"])
    assert details["objective"] == phase["objective"].replace("_", " ")
    assert details["starts from"] == (phase["from"] or "random weights") and details["data"] == phase["data"]
    for key, label in {"correct": "correct answers", "accuracy": "reward model: pairs ranked right"}.items():
        assert (key in phase) == (label in details)
        assert key not in phase or details[label].startswith(f"{100 * phase[key]['mean']:.1f}\N{NO-BREAK SPACE}%")
    after = {entry["phase"]: 100 * entry["both"]["mean"] for entry in SHIPPED["phases"] if "both" in entry}
    assert dict(zip(found["bars 3"]["labels"], found["bars 3"]["values"], strict=True)) == pytest.approx(after, 1e-5)


def test_the_newest_results_of_the_folder_are_shown(tmp_path: Path) -> None:
    assert panels(runs=tmp_path) == panels(runs=tmp_path / "missing") == panels() == panels(results=EXAMPLE)
    write(tmp_path / "old" / "results.json", pipeline(1, 1), 1_000)
    write(tmp_path / "new" / "results.json", pipeline(3, 1), 2_000)
    others = {"text": "no JSON", "list": [], "empty": {"phases": []}, "other": {"phases": [{}]}}
    for name, content in (others | {"deep": "[" * 100_000, "large": " " * (MAX_BYTES + 1)}).items():
        write(tmp_path / name / "results.json", content, 3_000)
    write(tmp_path.parent / "outside" / "results.json", pipeline(1, 9), 4_000)
    (tmp_path / "link").symlink_to(tmp_path.parent / "outside")
    found = panels(runs=tmp_path, phase=8)
    assert found["bars 1"]["values"] == [75, 25] and found["bars 1"]["selected"] == 1
    assert [edge["from"] for edge in found["diagram 0"]["edges"]] == ["p0"]
    assert [panel["rows"][0][0] for panel in found.values() if panel["kind"] == "table"][1] == "new/results.json"
    assert panels(runs=tmp_path, results=EXAMPLE) == panels()
    assert panels(runs=tmp_path, results=NEWEST) == panels(runs=tmp_path)


def test_a_file_may_be_removed_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "old" / "results.json", pipeline(1, 1), 1_000)
    write(tmp_path / "new" / "results.json", pipeline(3, 1), 2_000)
    resolve = Path.resolve

    def resolve_and_remove(path: Path, strict: bool = False) -> Path:
        found = resolve(path, strict)
        if path.parent.name == "new":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "resolve", resolve_and_remove)
    assert newest_files(tmp_path, "results.json") == [tmp_path / "old" / "results.json"]
    monkeypatch.undo()
    monkeypatch.setattr("regard.instruments.phases.newest_files", lambda *_: [tmp_path / "gone" / "results.json"])
    assert panels(runs=tmp_path) == panels()


@pytest.mark.parametrize(
    "results",
    [
        None,
        pipeline(*[1] * 9),
        pipeline(0, 0),
        pipeline(float("nan")),
        pipeline(10**400),  # an integer that is no float
        pipeline(1, phases=[pipeline(1)["phases"][0] | {"correct": 1e308}]),
        pipeline(1, phases=[{"phase": "p", "tokens": True, "flops": 1, "seconds": 1}]),
        pipeline(1, phases=[*pipeline(1)["phases"]] * 2),
        pipeline(1, phases=[pipeline(1)["phases"][0] | {"correct": "x"}]),
    ],
)
def test_a_file_that_is_no_pipeline_is_refused(results: Any) -> None:
    with pytest.raises(ValueError, match=r"file|number"):
        read_results(results, "file")
