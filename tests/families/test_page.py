"""docs/topics/families.md and the README agree with the families and their test cases."""

from regard.families import FAMILIES
from tests.families.page import PAGE, ROOT, count_configs, replace_table


def test_the_table_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == replace_table(page), "the table is out of date; run python -m tests.families.page"


def test_every_class_has_at_least_three_configs() -> None:
    tested = count_configs()
    assert tested.keys() == FAMILIES.keys()
    assert all(count >= 3 for counts in tested.values() for count in counts.values())


def test_the_readme_has_the_right_counts() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    configs = [count for counts in count_configs().values() for count in counts.values()]
    assert f"[{len(FAMILIES)} families]" in readme
    assert f"{len(configs)} classes of `transformers` on {sum(configs)} tiny configs" in readme


def test_a_family_is_at_most_150_lines() -> None:
    for path in (ROOT / "src/regard/families").glob("*.py"):
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= 150, f"{path.name} has {lines} lines; move code that it shares with others to families/common/"
