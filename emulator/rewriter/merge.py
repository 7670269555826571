"""One text of what the host and the device see of a source."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from .items import CONSTANT, MARKER, SPACES, Item, Token, View, declared_names, matching


class Merge:
    """The host's text with what device functions see otherwise."""

    def __init__(self, host: View, device: View):
        self.host, self.device = host, device
        self.edits: list[tuple[int, int, str]] = []
        self.renamed: set[str] = set()
        self.foreign = {item.key for item in self.all_items(host.items) if item.kind == "foreign"}

    @classmethod
    def all_items(cls, items: list[Item]):
        for item in items:
            yield item
            yield from cls.all_items(item.children)

    def text(self) -> str:
        while True:  # what is made of a constant that has two values has two itself
            known = len(self.renamed)
            self.edits = []
            self.items(self.host.items, self.device.items, len(self.host.text))
            if len(self.renamed) == known:
                break
        out, at = [], 0
        for start, end, new in sorted(self.edits, key=lambda edit: edit[:2]):
            out += [self.host.text[at:start], new, self.host.marker(end)]
            at = end
        out.append(self.host.text[at:])
        return finished("".join(out))

    def items(self, host: list[Item], device: list[Item], end: int) -> None:
        """Merges the declarations of one scope, which ends at `end`."""
        keys = [item.key for item in host], [item.key for item in device]
        blocks: Sequence[tuple[str, int, int, int, int]] = [("equal", 0, len(host), 0, len(device))]
        if keys[0] != keys[1]:
            blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes()
        only_host = [item for what, a, b, _, _ in blocks if what in ("delete", "replace") for item in host[a:b]]
        for what, a, b, c, d in blocks:
            if what == "equal":
                for ours, theirs in zip(host[a:b], device[c:d], strict=True):
                    self.pair(ours, theirs)
                continue
            for item in host[a:b]:
                if item.kind == "function" and not item.on_host:
                    self.edits.append((item.start, item.end, ""))  # for no architecture that runs here
            at = host[b].start if b < len(host) else end
            for item in device[c:d]:
                self.insert(item, only_host, at)

    def pair(self, ours: Item, theirs: Item) -> None:
        if ours.kind == "scope":
            self.items(ours.children, theirs.children, self.end_of_scope(ours))
        elif ours.kind == "function":
            self.function(ours, theirs)
        elif ours.kind == "other" and self.renamed:
            words = [t.text for t in theirs.tokens]
            names = declared_names(words)
            if names and self.renamed.intersection(words).difference(names):
                self.insert_other(theirs, names, ours.end)

    def end_of_scope(self, scope: Item) -> int:
        last = max((child.end for child in scope.children), default=scope.start)
        return self.host.text.index("}", last)

    def function(self, ours: Item, theirs: Item) -> None:
        assert ours.body is not None
        assert theirs.body is not None
        on_device = theirs.on_device or theirs.constexpr
        on_host = ours.on_host
        body = self.device_text(*theirs.body)
        if self.same(ours.body, theirs.body):
            return
        if on_device and on_host:
            self.both(ours.body, theirs.body, constexpr=ours.constexpr or theirs.constexpr)
        elif on_device:
            self.edits.append((*ours.body, self.device.marker(theirs.body[0]) + body))
        else:
            self.lambdas(ours.body, theirs.body)

    def same(self, ours: tuple[int, int], theirs: tuple[int, int]) -> bool:
        device = [self.name(t, b) for b, t in self.with_before(self.device.tokens_between(*theirs))]
        return device == [t.text for t in self.host.tokens_between(*ours)]

    def both(self, ours: tuple[int, int], theirs: tuple[int, int], constexpr: bool = False) -> None:
        choice = f"{{ if ({'!__builtin_is_constant_evaluated() && ' if constexpr else ''}::kf::simt::on_device()) "
        body = self.device.marker(theirs[0]) + self.device_text(*theirs)
        text = choice + body + self.host.marker(ours[0]) + self.host.text[slice(*ours)] + " }"
        self.edits.append((*ours, text))

    def lambdas(self, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        """In a host function: the device functions in it, as lambdas and members of local classes are."""
        regions = self.device_regions(self.host, ours), self.device_regions(self.device, theirs)
        if len(regions[0]) != len(regions[1]):
            raise self.host.error(
                ours[0], "this host function holds other __device__ functions with __CUDA_ARCH__ than without"
            )
        for (own, on_host), (other, _) in zip(*regions, strict=True):
            if self.same(own, other):
                continue
            if on_host:
                self.both(own, other)
            else:
                self.edits.append((*own, self.device.marker(other[0]) + self.device_text(*other)))

    @staticmethod
    def device_regions(view: View, body: tuple[int, int]) -> list[tuple[tuple[int, int], bool]]:
        """The bodies within a function's body that run on the device, and whether they run on the host, too."""
        tokens = view.tokens_between(*body)
        words = [t.text for t in tokens]
        regions = []
        i = 0
        while i < len(words):
            if words[i] not in SPACES:
                i += 1
                continue
            spaces = set()
            while words[i] in SPACES:
                spaces.add(words[i])
                i += 1
            while i < len(words) and words[i] not in ("{", ";"):
                i = matching(words, i) + 1 if words[i] in ("(", "[") else i + 1
            if i < len(words) and words[i] == "{" and spaces != {"__kf_host__"}:
                end = matching(words, i)
                regions.append(((tokens[i].start, tokens[end].end), "__kf_host__" in spaces))
                i = end
        return regions

    def insert(self, item: Item, only_host: list[Item], at: int) -> None:
        """Adds what only the device's text declares."""
        if item.kind == "function" and not (item.on_device or item.constexpr):
            return
        if item.kind == "foreign" and item.key in self.foreign:
            return
        if item.kind == "other":
            names = set(declared_names([t.text for t in item.tokens]))
            for other in only_host:
                both = names.intersection(declared_names([t.text for t in other.tokens]))
                if other.kind == "other" and both:
                    self.insert_other(item, sorted(both), at)
                    return
        self.edits.append((at, at, self.device.marker(item.start) + self.device_text(item.start, item.end)))

    def insert_other(self, item: Item, names: list[str], at: int) -> None:
        words = {t.text for t in item.tokens}
        whole = not item.in_class or words & {"static", "using", "typedef", "enum"}
        if not names or not words & CONSTANT or not whole:
            what = f"`{names[0]}`" if names else "this declaration"
            raise self.device.error(
                item.start,
                f"{what} is another with __CUDA_ARCH__ than without it, and the emulation has host and device code in "
                "one program; only constants, types, macros and the bodies of functions may differ",
            )
        self.renamed.update(names)
        self.edits.append((at, at, self.device.marker(item.start) + self.device_text(item.start, item.end)))

    @staticmethod
    def with_before(tokens: list[Token]):
        return zip(["", *(t.text for t in tokens)], tokens, strict=False)

    def name(self, token: Token, before: str) -> str:
        return f"{token.text}_on_device" if token.text in self.renamed and before not in (".", "->") else token.text

    def device_text(self, start: int, end: int) -> str:
        """A piece of the device's text, with the device's names of what has two."""
        out, at = [], start
        for before, token in self.with_before(self.device.tokens_between(start, end)):
            name = self.name(token, before)
            if name != token.text:
                out += [self.device.text[at : token.start], name]
                at = token.end
        return "".join(out) + self.device.text[at:end]


def finished(text: str) -> str:
    """Without the traces of __device__ and the like, and without the nesting of includes, which is no longer whole."""
    text = re.sub(r"\b__kf_(?:global|device|host)__\b", "", text)
    return MARKER.sub(lambda m: f'# {m[1]} "{m[2]}"' + "".join(f" {f}" for f in m[3].split() if f in "34"), text)


def merge(host: View, device: View) -> str | None:
    """One text to compile of two, or None if they are the same. Raises ViewError."""
    if host.text == device.text:
        return None
    # Of other people's files only those need to be understood that differ.
    opaque = {file for file in host.theirs | device.theirs if host.texts.get(file) == device.texts.get(file)}
    opaque |= {file for file in host.texts.keys() | device.texts.keys() if file.startswith("<")}
    host.parse(opaque)
    device.parse(opaque)
    return Merge(host, device).text()
