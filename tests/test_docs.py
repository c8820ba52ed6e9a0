"""The documentation is complete and agrees with the code. Its examples are run by the conftest.py of the root."""

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

import arrayopt as ao
import arrayopt.torch as door
from arrayopt import testing
from arrayopt.engines.registry import ENGINES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(p for p in DOCS.glob("**/*.md") if "_build" not in p.parts)
RULES = [name for name in ao.__all__ if isinstance(getattr(ao, name), type) and issubclass(getattr(ao, name), ao.Rule)]
PUBLISHED = [name for name in RULES if name != "Rule"]

DIRECTIVE = re.compile(r"^\s*\.\. (?:py:)?(?:auto)?(?:class|function|data|module):: ([\w.]+)", re.MULTILINE)
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")


def page_of(rule):
    """The page about a rule, and the name that its table has for it."""
    return DOCS / "rules" / f"{'adam' if rule in ('Adam', 'AdamW') else rule.lower()}.md"


def option_table(path, rule=""):
    """The rows of the table of options: name, default, range; none that another rule of the page has alone."""
    section = path.read_text(encoding="utf-8").split("## Options")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    others = [row for row in rows[2:] if (alone := re.search(r"(\w+) alone", row[3])) and alone[1] != rule]
    return {row[0].strip("`"): (row[1], row[2]) for row in rows[2:] if row not in others}


# ---- reference -------------------------------------------------------------------------------------------------------


def documented():
    return [name for page in (DOCS / "reference").glob("*.md") for name in DIRECTIVE.findall(page.read_text("utf-8"))]


PUBLIC = [
    f"{home.__name__}.{name}" for home in (ao, ao.projections, ao.ranks, ao.schedules, testing) for name in home.__all__
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference_once(name):
    assert documented().count(name) == 1


def test_no_property_begins_with_a_type():
    """Sphinx takes what is before a colon in the first line of a property's docstring for its type."""
    classes = [x for x in map(reach, documented()) if isinstance(x, type)]
    shown = [(x, name, part) for x in classes for name, part in inspect.getmembers(x) if isinstance(part, property)]
    firsts = {f"{x.__name__}.{name}": (part.__doc__ or "").split("\n")[0] for x, name, part in shown if name[0] != "_"}
    assert [name for name, first in firsts.items() if re.search(r":(?!`)", re.sub("`+[^`]*`+", "", first))] == []


def test_the_reference_names_nothing_else():
    made_by_the_optimizer = {
        "arrayopt.params.groups.Group",
        "arrayopt.step.stats.Stats",
        "arrayopt.testing.fixtures.backend",
        "arrayopt.testing.fixtures.recorded",
    }
    of_doors = {
        "arrayopt.torch.Optimizer",
        "arrayopt.torch.optimizer",
        "arrayopt.torch.overlap",
        "arrayopt.torch.split",
    }  # what is there for each rule is made of these
    of_doors |= {"arrayopt.optax.State", "arrayopt.optax.transformation"}
    assert set(documented()) - set(PUBLIC) == made_by_the_optimizer | of_doors


# ---- pages about rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", PUBLISHED)
def test_a_page_lists_every_option_with_its_default_and_range(rule):
    fields = {f.name: f for f in dataclasses.fields(getattr(ao, rule))}
    table = option_table(page_of(rule), rule)
    common = {f.name for f in dataclasses.fields(ao.Rule)}  # which docs/precision.md describes
    assert set(fields) - common <= set(table) <= set(fields)
    for name, (default, interval) in table.items():
        field = fields[name]
        assert interval == (field.metadata.get("interval") or ""), name
        if field.default is dataclasses.MISSING:
            assert default == "required", name
        else:
            own = re.search(rf"{rule} `([^`]+)`", default) or re.search(r"`([^`]+)`", default)
            assert ast.literal_eval(own[1]) == field.default, name


def test_one_page_lists_the_options_of_every_rule_and_each_rule_links_to_it():
    fields = {f.name: f for f in dataclasses.fields(ao.Rule)}
    table = option_table(DOCS / "rules" / "index.md")
    assert list(table) == list(fields)
    for name, (default, interval) in table.items():
        assert ast.literal_eval(default.strip("`")) == fields[name].default, name
        assert interval == (fields[name].metadata.get("interval") or ""), name
    for rule in PUBLISHED:
        section = page_of(rule).read_text("utf-8").split("## Options")[1].split("\n## ")[0]
        assert "(index.md#options-of-every-rule)" in section, rule


def test_the_readme_counts_the_rules_and_their_table_has_every_one():
    assert f"**{len(PUBLISHED)} [rules]" in (ROOT / "README.md").read_text("utf-8")
    rows = [line for line in (DOCS / "rules" / "index.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    for rule in PUBLISHED:
        assert any(re.match(rf"\| \[?`?{rule}\b", row) for row in rows), rule


# ---- links and examples ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page):
    """Sphinx checks the pages of docs/ too; README.md is not among them, and is read where it stands."""
    links = [link for link in LINK.findall(page.read_text("utf-8")) if not re.match(r"https?:|#", link)]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_python_that_is_not_run_says_so(page):
    """A fence that is neither run nor a shell's nor text is a directive with a caption; fences of colons are text."""
    assert not re.search("^:::", page.read_text("utf-8"), re.MULTILINE)
    for kind, rest in re.findall(r"^```(\{?[\w-]+\}?)[^\n]*\n([^\n]*)", page.read_text("utf-8"), re.MULTILINE):
        assert (
            kind in ("python", "sh", "text")
            or kind in ("{eval-rst}", "{toctree}", "{include}", "{literalinclude}")
            or (kind == "{code-block}" and rest.endswith("not run"))
        )


# ---- stale claims ----------------------------------------------------------------------------------------------------

TEXTS = [ROOT / "README.md", *PAGES]
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
each_text = pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))


def reach(path):
    """What a dotted path leads to, through modules, attributes and fields; AttributeError or ImportError if nothing."""
    names = path.split(".")
    found, done = ao, ["arrayopt"]
    for name in names[1:]:
        done.append(name)
        fields = getattr(found, "__dataclass_fields__", {})
        try:
            found = fields[name] if name in fields else getattr(found, name)
        except AttributeError:
            found = importlib.import_module(".".join(done))
    return found


@each_text
def test_files_and_modules_that_a_page_names_exist(page):
    text = page.read_text("utf-8")
    for code in CODE.findall(text):
        if re.fullmatch(r"(arrayopt|tests|docs|benchmarks|kernels)/[\w./-]*", code):
            assert (ROOT / code).exists() or code == "docs/_build", code
        if re.fullmatch(r"(arrayopt|ao)(\.\w+)+", code):
            reach("arrayopt." + code.partition(".")[2])
    for module in re.findall(r"^(?:>>> )?from (arrayopt[\w.]*) import", text, re.MULTILINE):
        importlib.import_module(module)


@each_text
def test_what_a_page_says_of_an_optimizer_is_there(page):
    """`opt.lr`, `opt.step(grads)`, `opt.groups[0].lr`: a public name of an Optimizer, or a field of a rule."""
    known = {name for rule in RULES for name in getattr(ao, rule).__dataclass_fields__} | set(dir(ao.Optimizer))
    known |= {"clip_norm"} | (set(dir(door.Optimizer)) if page.name in ("torch.md", "ddp.md", "README.md") else set())
    for name in re.findall(r"\bopt\.([a-z]\w*)", page.read_text("utf-8")):
        assert name in known or name in ("param_groups", "pt"), name


@each_text
def test_engines_and_schedules_that_a_page_names_exist(page):
    text = page.read_text("utf-8")
    for name in re.findall(r"engine=\"(\w+)\"", text):
        assert name in ("auto", *ENGINES), name
    for name in re.findall(r"arrayopt\.schedules\.(\w+)", text):
        assert hasattr(ao.schedules, name), name
    for names in re.findall(r"from arrayopt\.schedules import ([\w, ]+)", text):
        assert set(names.split(", ")) <= set(ao.schedules.__all__)


def test_a_stale_name_is_found():
    with pytest.raises(ImportError):
        reach("arrayopt.groups.Group")
    with pytest.raises(ImportError):
        reach("arrayopt.LAMB.beta9")
