"""Tables say what the results files say, and a stale one is found."""

import json

import pytest

from kernel_fusion import cli, steps, testing
from kernel_fusion.console import UserError
from kernel_fusion.report import documents as report
from kernel_fusion.report import results, syllabus, tables

V1 = """// double v1_naive: a thread an element
//
// Idea      Read, double, write.
// Moves     2·n·sizeof(T) bytes
//           (and nothing else), n FLOPs
// Limits    float32, n ≤ 2³¹;
//           no strides
//
// A remark.
#include <kf/launch.h>
"""
V2 = V1.replace("v1_naive: a thread an element", "v2_vector: 16 bytes a thread")


def row(impl, ms, *, kind="rung", correct=True, width=8, dtype="float32", **more):
    case = {"op": "double", "pass": "forward", "impl": impl, "kind": kind, "dtype": dtype}
    sizes = {"shape": {"rows": 4, "width": width}, "bound": "memory", "bytes": 32 * width, "flops": 4 * width}
    measured = {"ms": ms, "ms_quartiles": [ms, ms], "host_bound": False, "correct": correct}
    rates = {
        "gb_s": 1234.5,
        "tflop_s": 0.5,
        "percent_of_ceiling": 61.7,
        "dram_bytes": None,
        "sectors_per_request": None,
    }
    return {**case, **sizes, **measured, **rates, **more}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one step, whose op `double` has two rungs and a README with a marker."""
    step = steps.Step("step1-fake", "step1_fake", "test.py")
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    monkeypatch.setattr(steps, "STEPS", (step,))
    kernels = tmp_path / "step1-fake" / "kernels" / "double"
    kernels.mkdir(parents=True)
    (kernels / "v1_naive.cu").write_text(V1)
    (kernels / "v2_vector.cu").write_text(V2)
    readme = tmp_path / "step1-fake" / "README.md"
    readme.write_text("# Fake\n\n<!-- results:double -->\nold\n<!-- /results -->\n\nafter\n")
    return step


def write_results(step, rows, name="h200", ops=None):
    folder = step.path / "results"
    folder.mkdir(exist_ok=True)
    environment = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "python": "3.12.3"}
    environment |= {"commit": "abc", "date": "2026-11-20", **({"ops": ops} if ops else {})}
    ceilings = {"copy_gb_s": {"256": 2000.0, "1024": 4000.0}, "matmul_tflop_s": 700.0}
    (folder / f"{name}.json").write_text(json.dumps({"environment": environment, "ceilings": ceilings, "rows": rows}))


def rewritten(step):
    readme = step.path / "README.md"
    report.update([readme], check=False)
    return readme.read_text()


def test_without_results_the_table_says_so_and_lists_the_rungs(repository):
    text = rewritten(repository)
    assert "Not yet measured on a GPU" in text
    assert "| [`v1_naive`](kernels/double/v1_naive.cu) | a thread an element |" in text
    assert "old" not in text
    assert text.endswith("<!-- /results -->\n\nafter\n")
    assert tables.page(repository) is None
    assert report.update_pages(check=False) == []


def test_a_lessons_table_has_time_share_and_what_a_rung_gained(repository):
    write_results(repository, [row("v1_naive", 0.2), row("v2_vector", 0.1), row("torch eager", 0.3, kind="peer")])
    text = rewritten(repository)
    where = "**rows 4, width 8, float32** on NVIDIA H200, 2026-11-20."
    assert f"{where} [Every case and figure](results/README.md#double)" in text
    assert "| rung | idea | time | of the ceiling | over the rung before |" in text
    assert "| [`v1_naive`](kernels/double/v1_naive.cu) | a thread an element | 200 µs | 62 % |  |" in text
    assert "| [`v2_vector`](kernels/double/v2_vector.cu) | 16 bytes a thread | 100 µs | 62 % | 2.00× |" in text
    assert "| *torch eager* |  | 300 µs | 62 % |  |" in text
    assert "†" not in text


def test_the_fastest_rung_stands_beside_the_fastest_peer(repository):
    rows = [
        row("v1_naive", 0.2),
        row("v2_vector", 0.1),
        row("torch eager", 0.3, kind="peer"),
        row("triton", 0.15, kind="peer"),
    ]
    write_results(repository, [*rows, row("wrong", 0.01, correct=False)])
    write_results(repository, [row("v1_naive", 0.01), row("triton", 0.02, kind="peer")], name="h100")
    page = steps.ROOT / "docs" / "page.md"
    text = report.render("<!-- best:h200 double width=8; double -->\n<!-- /best -->\n", page)
    line = (
        "| [double](../step1-fake/results/README.md#double) | rows 4, width 8, float32 "
        "| [`v2_vector`](../step1-fake/kernels/double/v2_vector.cu) | 100 µs | triton | 150 µs | 1.50× |"
    )
    assert text.count(line) == 2
    with pytest.raises(UserError, match="page.md: nobody measured double width=9 on h200"):
        report.render("<!-- best:h200 double; double width=9 -->\n<!-- /best -->\n", page)


def test_links_begin_where_the_document_stands(repository):
    write_results(repository, [row("v1_naive", 0.2)])
    text = report.render("<!-- results:double -->\n<!-- /results -->\n", steps.ROOT / "docs" / "page.md")
    assert "(../step1-fake/kernels/double/v1_naive.cu)" in text
    assert "(../step1-fake/results/README.md#double)" in text


def page_of(step):
    report.update_pages(check=False)
    return (step.path / "results" / "README.md").read_text()


def test_the_page_of_results_has_every_figure(repository):
    write_results(repository, [row("v1_naive", 0.2), row("v2_vector", 0.1), row("torch eager", 0.3, kind="peer")])
    text = page_of(repository)
    assert "NVIDIA H200, driver 580.1, CUDA 13.0, torch 2.11.0, 2026-11-20, commit abc." in text
    assert "](../kernels/double/v1_naive.cu) | 2·n·sizeof(T) = 256 bytes | 200 µs | 1234 | 0.5 | 62 % |  |" in text
    assert "= 256 bytes | 100 µs | 1234 | 0.5 | 62 % | 2.00× |" in text
    assert "| *torch eager* |  | 300 µs |" in text
    assert "Every case:" not in text
    assert "](h200-double-ladder.svg)" in text
    assert (repository.path / "results" / "h200-double-ladder.svg").exists()


def test_the_page_of_results_has_what_was_counted(repository):
    busy = {"DRAM": 3.0, "tensor": 61.7, "issue slots": 44.0, "FMA": 20.0, "L1": 30.0}  # this GPU has no XU
    counted = {"busy": busy, "conflicts": None, "occupancy": 18.7, "registers": 168, "limit": "tensor cores: busy"}
    first, second = row("v1_naive", 0.2), row("v2_vector", 0.1)
    write_results(repository, [first, {**second, "profile": counted}])
    text = page_of(repository)
    assert "What `kernel-fusion profile` says of rows 4, width 8, float32: " in text
    assert "](../kernels/double/v2_vector.cu) | 62 % | 44 % |  | 30 % | 3 % |  | 19 % | 168 | tensor cores: bu" in text
    write_results(repository, [first, second])
    assert "kernel-fusion profile" not in page_of(repository)


def test_the_page_of_results_is_found_stale(repository):
    write_results(repository, [row("v1_naive", 0.2)])
    folder = repository.path / "results"
    made = [folder / "README.md", folder / "h200-double-ladder.svg"]
    assert report.update_pages(check=True) == made
    assert not made[0].exists()
    assert report.update_pages(check=False) == made
    assert report.update_pages(check=True) == []
    write_results(repository, [row("v1_naive", 0.25)])
    assert report.update_pages(check=True) == made


def test_what_is_no_op_has_figures_too(repository):
    shape = {"parameters": 124_439_808, "batch": 8}
    model = {"op": "gpt2_prefill", "shape": shape}
    rows = [row("separate", 4.9, **model), row("fused", 54.6, **model), row("theirs", 6.7, kind="peer", **model)]
    write_results(repository, [*rows, row("separate", 2.0, op="gpt2_train", shape=shape)])
    text = report.render("<!-- models:step1-fake -->\n<!-- /models -->\n", repository.path / "README.md")
    assert "|  | parameters | batch | dtype | separate | fused | theirs |" in text
    assert "| gpt2_prefill | 124 M | 8 | float32 | 4.90 ms | 54.6 ms | 6.70 ms |" in text
    assert "| gpt2_train | 124 M | 8 | float32 | 2.00 ms |  |  |" in text
    for file, there in (("h200", True), ("h200-other", False)):
        text = report.render(
            f"<!-- models:step1-fake {file} -->\n<!-- /models -->\n", repository.path / "pages" / "a.md"
        )
        assert ("[Every figure](../results/README.md)" in text) == there
    assert "## gpt2_prefill" in page_of(repository)


def test_an_op_measured_later_says_when(repository):
    write_results(repository, [row("v1_naive", 0.2)], ops={"double": {"commit": "def", "date": "2026-12-01"}})
    assert "on NVIDIA H200, 2026-12-01." in rewritten(repository)
    assert "torch 2.11.0, 2026-12-01, commit def." in page_of(repository)


def test_a_row_measured_later_than_its_ops_others_says_when(repository):
    run = {"commit": "def", "date": "2026-12-01"}
    rows = [row("v1_naive", 0.2), row("v2_vector", 0.1, run=run), row("v2_vector", 0.1, run=run, width=4)]
    write_results(repository, [*rows, row("triton", 0.3, kind="peer", run={**run, "commit": None})])
    for text in (rewritten(repository), page_of(repository)):
        assert "\n\nOf another run, 2026-12-01, commit def: `v2_vector`.\n" in text
        assert "\n\nOf another run, 2026-12-01: `triton`.\n" in text
    assert "torch 2.11.0, 2026-11-20, commit abc." in page_of(repository)


def test_rows_of_a_rung_that_is_gone_are_an_error(repository, capsys):
    here = [row("v1_naive", 0.2), row("cpu", 0.2), row("theirs", 0.1, kind="peer"), row("separate", 0.2, op="model")]
    write_results(repository, here)
    assert report.orphans() == []
    write_results(repository, [*here, row("v9_gone", 0.2), row("v9_gone", 0.2, width=4)])
    (line,) = report.orphans()
    assert "h200.json: double has no rung 'v9_gone' any more; to drop its rows: " in line
    assert line.endswith(": kernel-fusion bench --op double --merge")
    assert cli.main(["report"]) == 1
    assert line in capsys.readouterr().out


def test_counters_have_columns_where_a_row_has_them(repository):
    counted = {"dram_bytes": 264, "sectors_per_request": {"load": 4.0, "store": None}}
    write_results(repository, [row("v1_naive", 0.2), row("v2_vector", 0.1, **counted)])
    text = page_of(repository)
    assert "| over the rung before | DRAM, of the least | sectors, load / store |" in text
    assert "| 62 % |  |  |  |\n" in text
    assert "| 62 % | 2.00× | 264 bytes, 1.03× | 4 / – |\n" in text
    assert "DRAM" not in rewritten(repository)
    write_results(repository, [row("v1_naive", 0.2)])
    assert "| DRAM, of the least |" not in page_of(repository)


def test_without_a_ceiling_the_cell_is_empty(repository):
    rows = [row("v1_naive", 0.2, percent_of_ceiling=None), row("v1_naive", 0.1, width=4, dtype="float16")]
    write_results(repository, rows)
    assert "| a thread an element | 200 µs |  |  |" in rewritten(repository)
    text = page_of(repository)
    assert "| 200 µs | 1234 | 0.5 |  |  |" in text
    assert "| rows 4, width 8, float32 | 200 µs |\n" in text
    assert "| rows 4, width 4, float16 | 100 µs (62 %) |\n" in text


def test_a_time_of_the_host_is_marked_and_explained(repository):
    rows = [row("v1_naive", 0.2), row("v2_vector", 0.1, host_bound=True), row("v1_naive", 0.3, width=4)]
    write_results(repository, rows)
    for text in (rewritten(repository), page_of(repository)):
        assert "| 100 µs† |" in text
        assert "| 200 µs |" in text
        assert text.count(tables.HOST_BOUND) == 1
    assert "| rows 4, width 8, float32 | 200 µs (62 %) | 100 µs† (62 %) |" in page_of(repository)


def test_a_backward_op_is_called_backward_once(repository):
    write_results(repository, [row("v1_naive", 0.2, **{"pass": "backward"})])
    assert "**backward, rows 4, width 8, float32**" in rewritten(repository)
    named_so = row("v1_naive", 0.2, **{"pass": "backward", "op": "double_backward"})
    assert results.case_title(named_so) == "rows 4, width 8, float32"


def test_a_wrong_result_shows_no_time(repository):
    write_results(repository, [row("v1_naive", 0.2, correct=False), row("v2_vector", 0.1)])
    for text in (rewritten(repository), page_of(repository)):
        assert "| wrong result |" in text
        assert "200 µs" not in text
        assert "2.00×" not in text


def test_several_cases_give_the_largest_and_on_the_page_a_line_each(repository):
    write_results(repository, [row("v1_naive", 0.2), row("v1_naive", 0.4, width=800, dtype="bfloat16")])
    text = rewritten(repository)
    assert "**rows 4, width 800, bfloat16** on" in text
    assert "200 µs" not in text
    text = page_of(repository)
    assert "**rows 4, width 800, bfloat16** (25.6 KB at the least)" in text
    assert "| rows 4, width 8, float32 | 200 µs (62 %) |" in text


def test_a_marker_can_select_a_case(repository):
    write_results(repository, [row("v1_naive", 0.2), row("v1_naive", 0.4, width=800)])
    readme = repository.path / "README.md"
    readme.write_text("<!-- results:double width=8 -->\n<!-- /results -->\n")
    text = rewritten(repository)
    assert "200 µs" in text
    assert "400 µs" not in text


def test_packed_rows_are_meant_where_documents_are_named(repository):
    packed = row("v1_naive", 0.4)
    packed |= {"shape": {"tokens": 900, "documents": 3, "width": 8}, "bytes": 9000}
    write_results(repository, [row("v1_naive", 0.2), packed])
    text = rewritten(repository)
    assert "200 µs" in text
    assert "400 µs" not in text
    assert "400 µs" in page_of(repository)
    readme = repository.path / "README.md"
    table = "<!-- results:double documents=3 -->\n<!-- /results -->\n"
    readme.write_text(f"{table}<!-- claim: double width=8: ms(v1_naive) < 0.3 -->\n")
    assert "400 µs" in rewritten(repository)
    readme.write_text("<!-- claim: double documents=3: ms(v1_naive) < 0.3 -->\n")
    assert cli.main(["report"]) == 1


def test_check_finds_a_stale_table_and_writes_nothing(repository, capsys):
    readme = repository.path / "README.md"
    before = readme.read_text()
    assert cli.main(["report", "--check"]) == 1
    assert "stale" in capsys.readouterr().out
    assert readme.read_text() == before
    rewritten(repository)
    assert cli.main(["report", "--check"]) == 0
    readme.write_text(readme.read_text() + "<!-- claim: double: v1_naive > 1 -->\n")
    write_results(repository, [row("v1_naive", 0.2)])
    assert cli.main(["report"]) == 1
    assert "`v1_naive > 1` does not hold for double" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- results:double -->\n", "do not pair up"),
        ("<!-- /results -->\n", "do not pair up"),
        ("<!-- results:triple -->\n<!-- /results -->\n", "no step has an op 'triple'"),
        ("<!-- results:double wide -->\n<!-- /results -->\n", "must be name=value"),
        ("<!-- plot:ladder double -->\n", "do not pair up"),
        ("<!-- plot:ladder triple -->\n<!-- /plot -->\n", "no step has an op 'triple'"),
        ("<!-- plot:roofline step9 -->\n<!-- /plot -->\n", "README.md: `step` must be one of step1-fake"),
        ("<!-- plot:pie double -->\n<!-- /plot -->\n", "a ladder, a roofline, bytes or sectors, not 'pie'"),
        ("<!-- plot:bytes triple -->\n<!-- /plot -->\n", "no step has an op 'triple'"),
        ("<!-- plot:sectors v1=4@x -->\n<!-- /plot -->\n", "`v1=4@x` must be name=BYTES@APART"),
        ("<!-- models:step9 -->\n<!-- /models -->\n", "README.md: `step` must be one of step1-fake"),
        ("<!-- contents -->\n", "do not pair up"),
    ],
)
def test_a_bad_marker_is_an_error(repository, text, complaint):
    with testing.raises(UserError, complaint):
        report.render(text, repository.path / "README.md")


def test_results_in_another_form_are_an_error(repository):
    (repository.path / "results").mkdir()
    (repository.path / "results" / "h200.json").write_text("{")
    with testing.raises(results.ResultsError, "h200.json", "not in the form of results"):
        tables.compact("double", {}, repository.path / "README.md")


PLOTS = "<!-- plot:ladder double -->\n<!-- /plot -->\n<!-- plot:roofline step1-fake -->\nold\n<!-- /plot -->\n"


def test_plots_are_drawn_and_linked(repository):
    write_results(repository, [row("v1_naive", 0.2), row("v2_vector", 0.1), row("torch eager", 0.3, kind="peer")])
    (repository.path / "README.md").write_text(PLOTS)
    docs = steps.ROOT / "docs" / "page.md"
    docs.parent.mkdir()
    docs.write_text(PLOTS)
    folder = repository.path / "results"
    pictures = [folder / "h200-double-ladder.svg", folder / "h200-roofline.svg"]
    stale = report.update([repository.path / "README.md", docs], check=False)
    assert stale == [repository.path / "README.md", *pictures, docs]
    text = (repository.path / "README.md").read_text()
    assert "](results/h200-double-ladder.svg)\n\n<!-- /plot -->" in text
    assert "![double: rows 4, width 8, float32, on NVIDIA H200. v1_naive 200 µs, v2_vector 100 µs, torch eager" in text
    assert "](../step1-fake/results/h200-roofline.svg)" in docs.read_text()
    assert all(picture.read_text().startswith("<?xml") for picture in pictures)
    assert report.update([repository.path / "README.md", docs], check=True) == []


def test_check_finds_a_plot_that_is_stale_or_missing_and_draws_nothing(repository):
    write_results(repository, [row("v1_naive", 0.2)])
    readme = repository.path / "README.md"
    readme.write_text(PLOTS)
    report.update([readme], check=False)
    ladder, roofline = (repository.path / "results" / f"h200-{name}.svg" for name in ("double-ladder", "roofline"))
    before = ladder.read_text()
    roofline.unlink()
    write_results(repository, [row("v1_naive", 0.25)])
    assert report.update([readme], check=True) == [readme, ladder, roofline]
    assert ladder.read_text() == before
    assert not roofline.exists()
    assert report.update([readme], check=False) == [readme, ladder, roofline]
    assert ladder.read_text() != before


def test_without_results_there_is_no_plot(repository):
    (repository.path / "README.md").write_text(PLOTS)
    assert rewritten(repository).count("No plot yet: not measured on a GPU.") == 2


def test_contents_are_the_headings_that_follow(repository):
    after = "## One `two`\n\n```bash\n## no heading\n```\n\n## Three: 4\n"
    text = f"# Page\n\n<!-- contents -->\n<!-- /contents -->\n\n{after}"
    fresh = report.render(text, repository.path / "README.md")
    assert "\n[One `two`](#one-two) · [Three: 4](#three-4)\n" in fresh
    assert report.anchor("[v1](kernels/v1.cu): a thread, a chunk") == "v1-a-thread-a-chunk"


def test_this_repositorys_tables_and_prose_are_what_the_results_say_and_these_of_rungs_that_it_has():
    stale = report.update(report.documents(), check=True) + report.update_pages(check=True)
    assert stale == [], "write them anew with: kernel-fusion report"
    assert report.unsupported(report.documents()) == []
    assert report.orphans() == []


def test_the_syllabus_is_in_the_order_of_numbers(repository):
    kernels = repository.path / "kernels" / "double"
    (kernels / "v10_last.cu").write_text(V2 + "// one line more\n")
    rungs = syllabus.rungs(repository, "double")
    assert [rung.name for rung in rungs] == ["v1_naive", "v2_vector", "v10_last"]
    assert rungs[1].changed_since(rungs[0]) == 1
    assert rungs[0].lines() == 10
    assert rungs[0].moves == "2·n·sizeof(T)"
    assert rungs[0].limits == "float32, n ≤ 2³¹; no strides"
    assert syllabus.ops(repository) == ["double"]
    assert syllabus.first_reading(rungs) == ["v1_naive", "v2_vector", "v10_last"]
    with open(repository.path / "README.md", "a", encoding="utf-8") as page:
        page.write("\n[v1](kernels/double/v1_naive.cu).\n\n[v2](kernels/double/v2_vector.cu):\nSecond reading.\n")
    assert syllabus.first_reading(rungs) == ["v1_naive"]
