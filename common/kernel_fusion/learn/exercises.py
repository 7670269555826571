"""Exercises: their order, what their pages say of them, and the skeletons that are cut from their solutions.

A step has the solutions in `exercises/solutions`, and the puzzles, which come before the first step, in `docs/puzzles`.
The reader's files are in `my/`, a folder for each of these, which git ignores and which nothing here writes over.
A solution is a whole program with its answer between two markers, each a comment on a line of its own:

    // SOLUTION: what to write here
    // | the skeleton's own line instead of the answer, if it needs one
    the answer
    // END

The skeleton has `// TODO: what to write here` and its own lines in that place. A bug hunt's marker has no text and so
leaves no TODO: its skeleton holds the faulty lines and does not say where they are. Where a solution names its own
place, such as `exercises/solutions`, the skeleton names its place in `my/`.
"""

import difflib
import html
import os
import pathlib
import re
from typing import NamedTuple

from kernel_fusion import steps
from kernel_fusion.console import UserError
from kernel_fusion.report import results

# All of them in the order in which they are best done. In brackets what belongs to the second reading of its step; the
# rest is the core path.
ORDER = """
puzzle_01_map puzzle_02_zip puzzle_03_guard puzzle_04_two_dimensions puzzle_05_blocks puzzle_06_shared_memory
puzzle_07_transpose puzzle_08_block_sum puzzle_09_scan puzzle_10_histogram puzzle_11_product puzzle_12_softmax

1_grid_stride 2_vector_loads hunt_1_some_sizes 3_fuse 4_dropout_backward hunt_3_other_launch 5_column_sum
hunt_2_some_orders 6_async_copy (7_bulk_copy)

1_lanes_agree 2_one_pass hunt_1_cold_rows 3_attention_in_one_pass hunt_2_last_tile 4_swizzle hunt_3_fast_warps 5_merge
ladder_1_tiled ladder_2_any_length ladder_3_lanes ladder_4_mma ladder_5_attention_mma ladder_6_two_stages
(6_softmax_gradient 7_gradient_of_a_query hunt_5_half_a_mask hunt_4_lost_delta 8_one_owner 9_moved_a_little 10_ring
11_three_products ladder_7_tma ladder_8_wgmma)

1_statistics 2_two_groups hunt_2_far_from_0 hunt_1_one_head 3_row_gradient 4_columns_in_order hunt_3_last_rows
5_register_tile 6_epilogue 7_split_depth
(8_publish hunt_4_early_counter 9_queue hunt_5_few_blocks 10_next_launch 11_in_fragments 12_across_blocks)

1_kv_append 2_left_padding 3_greedy hunt_1_stale_graph 4_chunked_loss 5_fused_head hunt_2_broken_resume
(hunt_3_overtaken)
"""
NAMES = re.findall(r"\w+", ORDER)
LATER = {name for names in re.findall(r"\((.*?)\)", ORDER, re.DOTALL) for name in names.split()}

START, OWN_LINE, END = "// SOLUTION", "// |", "// END"
MY = "my"  # the reader's folder
PUZZLES = "puzzles"  # their group's name
HINTS = ("A nudge", "More", "Nearly the answer")  # what a page's folds are called


class Said(NamedTuple):
    """What the page of an exercise says of it."""

    title: str
    minutes: int
    hints: list[str]


def cut(solution: pathlib.Path) -> str:
    """The text of the skeleton that belongs to `solution`.

    Raises:
        UserError: a marker is missing or stands in a wrong place; the text names the line.
    """
    kept: list[str] = []
    opened = None  # the line of the marker whose answer we are in
    own_lines = False
    found = 0
    for number, line in enumerate(solution.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        if text.startswith(START):
            if opened:
                raise UserError(f"{solution}:{number}: SOLUTION within the one of line {opened}")
            todo = re.fullmatch(rf"{START}(?:: (\S.*))?", text)
            if not todo:
                raise UserError(f"{solution}:{number}: must be `{START}` or `{START}: what to write`, got `{text}`")
            if todo.group(1):
                kept.append(f"{indent}// TODO: {todo.group(1)}")
            opened, own_lines = number, True
            found += 1
        elif text == END:
            if not opened:
                raise UserError(f"{solution}:{number}: END without a SOLUTION before it")
            opened = None
        elif not opened:
            kept.append(line)
        elif own_lines and text.startswith(OWN_LINE):
            kept.append(f"{indent}{text.removeprefix(OWN_LINE).removeprefix(' ')}".rstrip())
        else:
            own_lines = False
    if opened:
        raise UserError(f"{solution}:{opened}: SOLUTION without an END after it")
    if not found:
        raise UserError(f"{solution}: no line `{START}`")
    folder, copies = solution.parent.parent, copy_of(solution).parent
    # In a step commands are run in its folder, else at the root.
    here = f"{MY}/{PUZZLES}" if folder.name == PUZZLES else f"../{MY}/{copies.name}"
    text = "\n".join(kept) + "\n"
    text = text.replace(f"docs/{PUZZLES}/solutions/", f"{here}/").replace("exercises/solutions/", f"{here}/")
    return text.replace('#include "../', f'#include "{os.path.relpath(folder, copies)}/')


def programs(folder: pathlib.Path) -> list[pathlib.Path]:
    """The solutions in a folder, in order; what is in no list comes last."""
    known = {name: number for number, name in enumerate(NAMES)}
    return sorted(folder.glob("*.cu"), key=lambda path: (known.get(path.stem, len(known)), path.stem))


def groups() -> dict[str, pathlib.Path]:
    """Where the exercises are, by name: the puzzles, then the steps by their folders."""
    found = {PUZZLES: steps.ROOT / "docs" / "puzzles"}
    return found | {step.folder: step.path / "exercises" for step in steps.STEPS}


def solutions() -> list[pathlib.Path]:
    """The solutions of every group, in order."""
    return [path for folder in groups().values() for path in programs(folder / "solutions")]


def group_of(solution: pathlib.Path) -> str:
    """The name of the group of an exercise."""
    folder = solution.parent.parent
    return PUZZLES if folder.name == PUZZLES else folder.parent.name


def copy_of(solution: pathlib.Path) -> pathlib.Path:
    """Where the reader's copy of the skeleton of `solution` stands."""
    return steps.ROOT / MY / group_of(solution) / solution.name


def page_of(solution: pathlib.Path) -> pathlib.Path:
    """The page that says what to do in an exercise."""
    return solution.parent.with_name("README.md")


def said_of(solution: pathlib.Path) -> Said:
    """What its page says of an exercise.

    Raises:
        UserError: the page has no heading of it.
    """
    page = page_of(solution)
    pattern = rf"^### {solution.name}: ([^\n]+) · (\d+) minutes$(.*?)(?=^##|\Z)"
    found = re.search(pattern, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if not found:
        raise UserError(f"{page.relative_to(steps.ROOT)} has no heading of {solution.name} with its minutes")
    hints = []
    for name in HINTS:
        fold = re.search(rf"<details><summary>{name}</summary>(.*?)</details>", found[3], re.DOTALL)
        hints += [html.unescape(re.sub("</?code>", "`", fold[1])).strip()] if fold else []
    return Said(found[1], int(found[2]), hints)


def answers(solution: pathlib.Path) -> str:
    """What a reader writes in an exercise, without its markers."""
    found = re.findall(rf"^ *{START}.*?\n(.*?)^ *{END}", solution.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for line in "…\n".join(found).splitlines() if not line.strip().startswith(OWN_LINE)]
    return "\n".join(lines)


def make(solution: pathlib.Path) -> bool:
    """Makes the reader's copy, if there is none. Returns whether it did."""
    copy = copy_of(solution)
    if copy.exists():
        return False
    results.replace(copy, cut(solution))
    return True


def reset(solution: pathlib.Path) -> pathlib.Path | None:
    """Begins an exercise anew, and keeps the reader's file beside it, numbered.

    Returns:
        Where that is; None where there was none, or one that was as handed out.
    """
    copy, text = copy_of(solution), cut(solution)
    if not copy.exists() or copy.read_text(encoding="utf-8") == text:
        results.replace(copy, text)
        return None
    number = 1
    while (kept := copy.with_name(f"{copy.name}.{number}")).exists():
        number += 1
    results.replace(kept, copy.read_text(encoding="utf-8"))
    results.replace(copy, text)
    return kept


def is_begun(solution: pathlib.Path) -> bool:
    """Whether the reader's copy is another one than what is handed out."""
    copy = copy_of(solution)
    return copy.exists() and copy.read_text(encoding="utf-8") != cut(solution)


def find(name: str) -> pathlib.Path:
    """The solution of the exercise called `name`, "1_grid_stride" for instance.

    Raises:
        UserError: there is none; the text has names that are like it.
    """
    wanted = pathlib.Path(name).name.removesuffix(".cu")
    known = {solution.stem: solution for solution in solutions()}
    if wanted not in known:
        alike = [other for other in known if wanted in other] or difflib.get_close_matches(wanted, known, cutoff=0.5)
        meant = f"did you mean {' or '.join(alike[:3])}? " if alike else ""
        raise UserError(f"there is no exercise {name!r}; {meant}`kernel-fusion learn` lists them")
    return known[wanted]
