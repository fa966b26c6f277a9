"""Parquet, Arrow and `datasets` folders have the rows that pyarrow wrote."""

import json
import pickle
from pathlib import Path

import pytest

from regard.data.file_index import FileError
from regard.data.readers import read_examples

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed; it is in the extra `data`")
ROWS = [{"text": f"row {n} é", "label": n % 3, "messages": [{"role": "user", "content": str(n)}]} for n in range(2500)]


def write_stream(path: Path, rows: list[dict], batch: int = 1000) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def write_file(path: Path, rows: list[dict]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=400)
    return path


def write_dataset(folder: Path, rows: list[dict]) -> Path:
    """The layout of `datasets.Dataset.save_to_disk` with two shards."""
    folder.mkdir(parents=True)
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for number, name in enumerate(names):
        half = len(rows) // 2
        write_stream(folder / name, rows[half * number : half * (number + 1)])
    state = {"_data_files": [{"filename": name} for name in names], "_split": None, "_indices_data_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


WRITERS = {"a.arrow": write_stream, "b.arrow": write_file, "a.parquet": write_parquet, "saved": write_dataset}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_those_that_were_written(name, tmp_path):
    path = WRITERS[name](tmp_path / name, ROWS)
    examples = read_examples(path)
    assert len(examples) == 2500 and list(examples) == ROWS
    assert examples[-1] == ROWS[-1] and examples[997:1003] == ROWS[997:1003]
    assert list(pickle.loads(pickle.dumps(examples))) == ROWS
    assert examples.origin(3).endswith("row 3")
    renamed = read_examples(path, columns={"class": "label"})
    assert renamed[4]["class"] == 1 and "label" not in renamed[4]


def test_the_arrow_copy_of_a_parquet_file_is_deleted_with_the_examples(tmp_path):
    examples = read_examples(write_parquet(tmp_path / "a.parquet", ROWS[:3]))
    copy = examples.files[0].copy.path
    assert copy.exists()
    del examples
    assert not copy.exists()


def test_a_folder_of_parquet_files_is_one_collection(tmp_path):
    for number in range(3):
        write_parquet(tmp_path / f"{number}.parquet", ROWS[number * 10 : number * 10 + 10])
    assert list(read_examples(tmp_path)) == ROWS[:30]


def test_a_split_of_a_dataset_dict_must_be_chosen(tmp_path):
    write_dataset(tmp_path / "saved" / "train", ROWS[:20])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(FileError, match=r"splits train, test; choose one, for example .*saved/train"):
        read_examples(tmp_path / "saved")
    assert len(read_examples(tmp_path / "saved" / "train")) == 20


@pytest.mark.parametrize("name", ["a.arrow", "b.arrow", "a.parquet"])
def test_truncated_files_are_refused(name, tmp_path):
    path = WRITERS[name](tmp_path / name, ROWS)
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(FileError, match="not a complete (Arrow|Parquet) file"):
        list(read_examples(path))
