"""Draws the pages' figures into docs/figures, as SVG: `python docs/figures.py`. A test compares them.

They follow the reader's light or dark page. What is read from C++ is compiled for it. One is measured: `one_layer`
draws what step 4's pages/token_trace.cu has recorded.
"""

import json
import math
import os
import pathlib
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from html import escape

FOLDER = pathlib.Path(__file__).resolve().parent / "figures"
STYLE = """\
text { font: 12px "DejaVu Sans", Verdana, sans-serif; fill: #1b1b1b; }
.small { font-size: 10px; }
.none { fill: none; stroke: #6b6b6b; }
.grey { fill: #e9e9e9; stroke: #7a7a7a; }
.blue { fill: #cfe1f7; stroke: #1f5fa8; }
.red { fill: #f8d9d1; stroke: #b3412f; }
.green { fill: #d5ecd4; stroke: #2f7d3a; }
@media (prefers-color-scheme: dark) {
  text { fill: #ececec; }
  .none { stroke: #a5a5a5; }
  .grey { fill: #3a3a3a; stroke: #9a9a9a; }
  .blue { fill: #1d3f66; stroke: #7db4f5; }
  .red { fill: #63291e; stroke: #f09a86; }
  .green { fill: #1f4a26; stroke: #86d08f; }
}
"""
WIDTH = 720


class Drawing:
    """Boxes, lines and text; a box's kind is its colour."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.height = 0.0

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> None:
        self.height = max(self.height, y + 6)
        named = f' class="{kind}"' if kind else ""
        self.lines.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{named}>{escape(words)}</text>')

    def box(
        self, x: float, y: float, wide: float, high: float, kind: str, words: str = "", small: bool = False
    ) -> None:
        self.height = max(self.height, y + high + 2)
        self.lines.append(f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" class="{kind}"/>')
        if words:
            self.text(x + wide / 2, y + high / 2 + (3.5 if small else 4.5), words, "middle", "small" if small else "")

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.lines.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="none"/>')

    def svg(self, title: str) -> str:
        size = f'width="{WIDTH}" height="{self.height:g}" viewBox="0 0 {WIDTH} {self.height:g}"'
        head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{escape(title)}</title>"]
        return "\n".join([*head, f"<style>\n{STYLE}</style>", *self.lines, "</svg>", ""])


def grid(draw: Drawing) -> None:
    """Three blocks of eight threads, and the twenty elements that they take"""
    blocks, threads, count, cell = 3, 8, 20, 28
    for block in range(blocks):
        left = 8 + block * (threads * cell + 12)
        draw.text(left, 16, f"blockIdx.x = {block}")
        for thread in range(threads):
            i = block * threads + thread
            x, kind = left + thread * cell, "blue" if i < count else "grey"
            draw.box(x, 24, cell, 24, kind, str(thread))
            if i < count:
                draw.line(x + cell / 2, 48, x + cell / 2, 78)
                draw.box(x, 78, cell, 24, "green", str(i))
    draw.text(
        8,
        122,
        "above: threadIdx.x, from 0 in each block; below: i = blockIdx.x · 8 + threadIdx.x, the thread's element",
    )
    draw.text(8, 140, "n = 20: the last four threads have no element, so if (i < n) keeps them out")


def coalescing(draw: Drawing) -> None:
    """Sectors that a warp's 32 lanes touch: neighbours 4, shifted by one 5, every second element 8, far apart 32"""
    word, shown = 8, 8  # pixels; sectors
    ways: list[tuple[str, Callable[[int], int]]] = [
        ("neighbours", lambda lane: lane),
        ("shifted by one", lambda lane: lane + 1),
        ("every second", lambda lane: 2 * lane),
        ("far apart", lambda lane: 32 * lane),
    ]
    for row, (name, place) in enumerate(ways):
        y, read = 22 + 34 * row, {place(lane) for lane in range(32)}
        sectors = {at // 8 for at in read}
        draw.text(8, y + 14, name)
        for sector in range(shown):
            left = 124 + sector * (8 * word + 3)
            for at in range(8):
                kind = "blue" if 8 * sector + at in read else "red" if sector in sectors else "none"
                draw.box(left + at * word, y, word, 20, kind)
        more = " …" if max(sectors) >= shown else ""
        draw.text(WIDTH - 8, y + 14, f"{more} {len(sectors)}", "end")
    draw.text(WIDTH - 8, 14, "sectors", "end")
    draw.text(8, 14, "4 bytes a lane")
    draw.text(8, 172, "blue: read; red: brought along in the same sector of 32 bytes, and not asked for")


def banks(draw: Drawing) -> None:
    """A tile's column in banks: with rows of 8 words all in one bank, with rows of 9 words one in each"""
    count, cell = 8, 30
    for side, padding in enumerate((0, 1)):
        left, width = 70 + 350 * side, count + padding
        draw.text(left, 16, f"tile[8][{width}]")
        for bank in range(count):
            draw.text(left + (bank + 0.5) * cell, 34, str(bank), "middle", "small")
        for at in range(count * width):
            row, col = divmod(at, width)
            kind = "blue" if col == 0 else "grey" if col == count else "none"
            x, y = left + at % count * cell, 40 + at // count * 22
            draw.box(x, y, cell, 22, kind, f"{row},{col}" if col < count else "", small=True)
        said = "column 0: all in bank 0, 8 turns" if not padding else "column 0: one in each bank, 1 turn"
        draw.text(left, 258, said)
    draw.text(8, 34, "bank")
    draw.text(
        8,
        278,
        "Eight banks in place of 32. A word lies in the bank of its address; grey is padding, which nobody reads.",
    )


def online_softmax(draw: Drawing) -> None:
    """Three tiles of scores, and after each the greatest so far and the sum, which a greater score scales down"""
    greatest, total = -math.inf, 0.0
    for number, tile in enumerate(((1, 3), (2, 5), (4, 1))):
        x, before = 8 + number * 238, greatest
        greatest = max(greatest, *tile)
        factor = math.exp(before - greatest) if number else 0.0
        added = sum(math.exp(score - greatest) for score in tile)
        total = total * factor + added
        for place, score in enumerate(tile):
            draw.box(x + place * 44, 24, 40, 26, "green", str(score))
        draw.text(x, 16, f"scores of tile {number}")
        draw.text(x, 72, f"old sum · {factor:.3f}" if number else "nothing before", kind="small")
        draw.text(x, 88, f"+ {' + '.join(f'exp({score} − {greatest})' for score in tile)}", kind="small")
        draw.box(x, 98, 94, 26, "red" if greatest > before else "grey", f"max {greatest}")
        draw.box(x + 98, 98, 110, 26, "blue", f"sum {total:.3f}")
    draw.text(
        8,
        146,
        "Red: the greatest score has changed, so what was added up before is multiplied by exp(old max − new max).",
    )


def fragments(draw: Drawing) -> None:
    """Which lane holds which elements: results of two products, 16 by 8 each, are one operand of 16 by 16"""
    wide, high = 20, 17
    for half in range(2):
        left = 72 + half * 8 * wide * 2
        for row in range(16):
            for pair in range(4):
                lane = row % 8 * 4 + pair
                kind = {0: "blue", 5: "red", 31: "green"}.get(lane, "none")
                draw.box(
                    left + pair * 2 * wide * 2, 40 + row * high, 2 * wide * 2, high, kind, f"lane {lane}", small=True
                )
        draw.text(left, 16, f"result of product {half}: keys {8 * half} to {8 * half + 7}")
        draw.text(left, 32, f"operand a: columns {8 * half} to {8 * half + 7}")
    for row in (0, 8):
        draw.text(8, 40 + (row + 4.5) * high, f"rows {row}–{row + 7}", kind="small")
    draw.text(
        8,
        332,
        "A box is two neighbouring columns, side by side in that lane. Lanes 0, 5 and 31 are coloured: a lane has",
    )
    draw.text(8, 350, "the same places in both, so what it has computed is what it must hand on, without any exchange.")


def ring(draw: Drawing) -> None:
    """Four stages on a time axis: a tile is loaded into one while others are read; a stage is loaded again when read"""
    stages, tiles, loading, reading, unit = 4, 9, 3.0, 1.2, 44
    free, used = [0.0] * stages, 0.0
    issued = 0.0
    for tile in range(tiles):
        stage = tile % stages
        begin = max(free[stage], issued)
        issued = begin + 0.3  # the producer issues one load after the other
        there = begin + loading
        used = max(used, there)
        y = 10 + stage * 34
        draw.box(90 + begin * unit, y, loading * unit, 26, "blue", f"load {tile}")
        if there < used:
            draw.box(90 + there * unit, y, (used - there) * unit, 26, "grey")
        draw.box(90 + used * unit, y, reading * unit, 26, "green", f"read {tile}")
        used += reading
        free[stage] = used
    for stage in range(stages):
        draw.text(8, 27 + stage * 34, f"stage {stage}")
    draw.text(90, 164, "time →   grey: full, and not read yet; nothing drawn: empty")


def one_launch(draw: Drawing) -> None:
    """Three blocks on a time axis: two launches wait between them, one launch with a queue fills the gap"""
    heads, bands, blocks, turn = 4, 4, 3, 26
    attention = [(f"A{band}.{head}", band) for band in range(bands) for head in range(heads)]
    queue: list[tuple[str, int]] = []
    for band in range(bands + 1):  # rows stand one band behind their heads
        queue += [one for one in attention if one[1] == band]
        queue += [(f"R{band - 1}", band - 1)] if band else []
    both = {"two launches": [attention, [(f"R{band}", band) for band in range(bands)]], "one launch, a queue": [queue]}
    for number, (name, launches) in enumerate(both.items()):
        top, start = 22 + number * 130, 0
        draw.text(8, top - 6, name)
        ends = [0] * blocks
        published: dict[int, list[int]] = {band: [] for band in range(bands)}
        for launch in launches:
            ends = [max(ends)] * blocks  # a launch begins when the one before has ended
            for words, band in launch:
                block = ends.index(min(ends))
                start = ends[block] if words[0] == "A" else max([ends[block], *published[band]])
                ends[block] = start + 3
                if words[0] == "A":
                    published[band].append(start + 3)
                kind = "blue" if words[0] == "A" else "green"
                draw.box(70 + start * turn, top + block * 28, 3 * turn - 2, 24, kind, words)
        for block in range(blocks):
            draw.text(8, top + 17 + block * 28, f"block {block}")
        draw.text(70, top + 98, f"{max(ends)} turns")
    draw.text(200, 250, "A2.1: attention, head 1 of band 2; R2: projection and LayerNorm of band 2", kind="small")


HOPS = """\
#include <cstdio>
#include "kernels/decode_step/schedule_check.h"
using namespace kf::decode_step;
int main() {
  const Schedule s(768, 3072, 50257, 3, 132);
  const Program program = program_of(s, 512);
  const char* separator = "[";
  for (size_t warp = 0; warp < program.warps.size(); ++warp) {
    for (const Action& a : program.warps[warp]) {
      if (a.first >= s.messages || a.tag != 2 || (a.what != Action::kWrite && a.what != Action::kRead)) continue;
      const int hop = a.first >= s.hidden_at ? 3 : a.first >= s.attended_at ? 1 : a.first >= s.qkv_at ? 0 : 2;
      std::printf("%s[%d, %d, %d, %d, %d]", separator, a.first < s.x_middle_at ? 4 : hop, a.what == Action::kWrite,
                  static_cast<int>(warp) / (kConsumers + 2), a.first, a.count);
      separator = ", ";
    }
  }
  std::printf("]");
}
"""


def hops() -> list[set[tuple[int, int]]]:
    """Of GPT-2 124M on 132 blocks, from v3_persistent's schedule: for each hop of a layer, who reads from whom."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++17", "-x", "c++", "-", "-o"]
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "hops"
        step = FOLDER.parents[1] / "step4-integration"
        subprocess.run([*command, str(program), f"-I{step}"], input=HOPS, text=True, check=True)
        accesses = json.loads(subprocess.run([str(program)], capture_output=True, check=True).stdout)
    writer: dict[int, int] = {}
    for _, writes, block, first, count in accesses:
        if writes:
            writer |= dict.fromkeys(range(first, first + count), block)
    pairs: list[set[tuple[int, int]]] = [set() for _ in range(5)]
    for hop, writes, block, first, count in accesses:
        if not writes:
            pairs[hop] |= {(block, writer[word]) for word in range(first, first + count)}
    return pairs


def five_hops(draw: Drawing) -> None:
    """A layer of GPT-2 124M on 132 blocks: which block reads what from whom, at each of five hops"""
    names = ("q k v", "attention", "x, projection", "hidden layer", "x, second product")
    readers = ("attention", "projection", "fc", "second product", "next q k v")
    blocks = 132
    dark = "@media (prefers-color-scheme: dark) { .fill { fill: #7db4f5; } }"
    draw.lines.append(f"<style>.fill {{ fill: #1f5fa8; }} {dark}</style>")
    for number, (sent, read, pairs) in enumerate(zip(names, readers, hops(), strict=True)):
        left, top = 8 + number * 143, 40
        draw.text(left, 16, f"{number + 1}: {sent}")
        draw.text(left, 32, f"→ {read}", kind="small")
        of_reader: dict[int, list[int]] = {}
        for reader, sender in sorted(pairs):
            of_reader.setdefault(reader, []).append(sender)
        # Neighbouring readers of the same messages, and neighbouring senders, are one box.
        begin = 0
        for reader in range(1, blocks + 1):
            if of_reader.get(reader) == of_reader.get(begin) and reader < blocks:
                continue
            senders = of_reader.get(begin, [])
            starts = [sender for sender in senders if sender - 1 not in senders]
            ends = [sender for sender in senders if sender + 1 not in senders]
            for first, last in zip(starts, ends, strict=True):
                draw.lines.append(
                    f'<rect x="{left + first}" y="{top + begin}" width="{last + 1 - first}" height="{reader - begin}" '
                    'class="fill"/>'
                )
            begin = reader
        draw.box(left, top, blocks, blocks, "none")
        each = [len(senders) for senders in of_reader.values()]
        draw.text(left, top + blocks + 16, f"{len(of_reader)} blocks read,", kind="small")
        least, most = min(each), max(each)
        draw.text(
            left, top + blocks + 29, f"each from {least if least == most else f'{least} to {most}'}", kind="small"
        )
    draw.text(
        8, 220, "across: the block that sends, 0 to 131; down: the block that reads. 512 tokens are in the cache."
    )


QUERIES, ATTENDED, WEIGHTS, INPUT, MULTIPLIED, SUMMED, SENT = range(7)  # token_block.h's Moment


def one_layer(draw: Drawing) -> None:
    """A layer of GPT-2 124M in one launch, recorded on an H200: what every third of 132 blocks does"""
    recorded = json.loads((FOLDER / "one_layer.json").read_text(encoding="utf-8"))
    left, top, high, every = 64, 60, 5, 3
    blocks = recorded["blocks"]
    begin, end = min(products[0][WEIGHTS] for products in blocks), max(products[-1][SENT] for products in blocks)
    each = (WIDTH - left - 12) / (end - begin)  # pixels of a nanosecond
    colours = {
        "waits": "#c9c9c9",
        "attention": "#8a5bb5",
        "product": "#1f5fa8",
        "sums, sends": "#2f9d4a",
        "takes weights": "#d2552f",
    }
    parts: dict[str, list[str]] = {name: [] for name in colours}
    for row, products in enumerate(blocks[::every]):
        y = top + row * high + high / 2

        def bar(name: str, since: float, until: float, y: float = y) -> None:
            if until > since:
                x = left + (since - begin) * each
                parts[name].append(f"M{x:.1f} {y:g}h{(until - since) * each:.1f}")

        now = products[0][WEIGHTS]
        for product in products:
            if product[ATTENDED]:
                bar("waits", now, product[QUERIES])
                bar("attention", product[QUERIES], product[ATTENDED])
                now = product[ATTENDED]
            bar("takes weights", now, product[WEIGHTS])
            bar("waits", product[WEIGHTS], product[INPUT])
            bar("product", product[INPUT], product[MULTIPLIED])
            bar("sums, sends", product[MULTIPLIED], product[SENT])
            now = product[SENT]
    x = 8.0
    for name, colour in colours.items():
        draw.lines.append(f'<path d="{"".join(parts[name])}" stroke="{colour}" stroke-width="{high - 1}" fill="none"/>')
        draw.lines.append(f'<rect x="{x:g}" y="8" width="12" height="12" fill="{colour}"/>')
        draw.text(x + 17, 18, name)
        x += 40 + 7.5 * len(name)
    for product, name in enumerate(("q k v", "projection", "fc", "second product")):
        first = min(products[product][INPUT] for products in blocks)
        draw.text(left + (first - begin) * each, top - 8, f"{name} →", kind="small")
    bottom = top + -(-len(blocks) // every) * high
    for block in range(0, len(blocks), 33):
        draw.text(left - 6, top + block / every * high + 8, f"block {block}", "end", "small")
    draw.line(left, bottom + 4, WIDTH - 12, bottom + 4)
    for moment in range(0, int((end - begin) / 1000) + 1, 2):
        x = left + moment * 1000 * each
        draw.line(x, bottom + 4, x, bottom + 9)
        draw.text(x, bottom + 20, f"{moment} µs" if moment else "0", "middle", "small")


FIGURES = (grid, coalescing, banks, online_softmax, fragments, ring, one_launch, five_hops, one_layer)


def figure(paint: Callable[[Drawing], None]) -> str:
    """The text of a figure's file; its title is the function's first line."""
    drawing = Drawing()
    paint(drawing)
    return drawing.svg(paint.__doc__ or "")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for paint in FIGURES:
        (FOLDER / f"{paint.__name__}.svg").write_text(figure(paint), encoding="utf-8")
