"""Kernels: `kernel<<<…>>>(…)` becomes a call, and a kernel says which one it is."""

from __future__ import annotations

import re

from .tokens import CLOSERS, NOT_CALLED, OPENERS, Token, Tokens

# Functions that take a kernel, and the position of that argument.
KERNEL_ARGUMENT = {
    **dict.fromkeys(("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cudaFuncSetAttribute"), 0),
    **dict.fromkeys(("cudaFuncSetCacheConfig", "cudaFuncSetSharedMemConfig"), 0),
    "cudaFuncGetAttributes": 1,
    **{f"cudaOccupancyMaxActiveBlocksPerMultiprocessor{end}": 1 for end in ("", "WithFlags")},
    **{f"cudaOccupancyMaxPotentialBlockSize{end}": 2 for end in ("", "VariableSMem")},
}
ZERO = re.compile(r"0[xXbB]?0*[uUlL]*")  # a null pointer, where one is wanted


class Launches(Tokens):
    @staticmethod
    def is_triple(tokens: list[Token], i: int, char: str) -> bool:
        """Three of the same character begin at token i. Formatters that do not know <<< make << < of it."""
        return [t.text for t in tokens[i : i + 3]] == [char] * 3

    def is_end_of_configuration(self, tokens: list[Token], i: int, spaced: bool) -> bool:
        """Whether >>> is at token i; with spaces in it only where <<< has some, and before the kernel's arguments."""
        if not self.is_triple(tokens, i, ">"):
            return False
        if tokens[i].end == tokens[i + 1].start and tokens[i + 1].end == tokens[i + 2].start:
            return True
        return spaced and [t.text for t in tokens[i + 3 : i + 4]] == ["("]

    def callee(self, tokens: list[Token], i: int) -> int:
        """The index of the first token of the expression that ends at i and is launched."""
        at = tokens[i].start if i >= 0 else 0
        while i >= 0:
            token = tokens[i]
            if token.text == ">":
                i = self.closing_angle(tokens, i, -1) - 1
                if i < 0 or tokens[i].kind != "word":
                    break
                continue
            if token.text in (")", "]"):
                start = self.closing(tokens, i, -1)
                before = tokens[start - 1] if start > 0 else None
                called = before is not None and (
                    (before.kind == "word" and before.text not in NOT_CALLED) or before.text in ("]", ">")
                )
                if not called and token.text == ")":
                    return start
                i = start - 1
                continue
            if token.kind != "word":
                break
            start = i
            if start > 0 and tokens[start - 1].text == "template":
                start -= 1
            if self.is_scope(tokens, start - 1):
                before = tokens[start - 3] if start >= 3 else None
                if before is not None and (
                    before.text == ">" or (before.kind == "word" and before.text not in NOT_CALLED)
                ):
                    i = start - 3
                    continue
                return start - 2
            if start > 0 and tokens[start - 1].text == ".":
                i = start - 2
                continue
            if start > 1 and tokens[start - 1].text == ">" and tokens[start - 2].text == "-":
                i = start - 3
                continue
            return start
        raise self.error(at, "cannot tell what is launched before <<<")

    def launch(self, tokens: list[Token], i: int) -> None:
        opening = tokens[i]
        if i == 0:
            raise self.error(opening.start, "cannot tell what is launched before <<<")
        first = self.callee(tokens, i - 1)
        j = i + 3
        spaced = opening.end < tokens[i + 1].start or tokens[i + 1].end < tokens[i + 2].start
        while j < len(tokens) and not self.is_end_of_configuration(tokens, j, spaced):
            if tokens[j].kind == "op" and tokens[j].text in OPENERS:
                j = self.closing(tokens, j)
            elif tokens[j].text in (";", "}", ")"):
                break
            j += 1
        if j >= len(tokens) or tokens[j].text != ">":
            raise self.error(opening.start, "<<< without >>>")
        if j + 3 >= len(tokens) or tokens[j + 3].text != "(":
            raise self.error(tokens[j].start, ">>> without the arguments of the kernel in parentheses")
        zeros = False
        depth = 0  # of brackets within the arguments
        for k in range(j + 4, self.closing(tokens, j + 3)):
            if tokens[k].kind == "op":
                depth += (tokens[k].text in OPENERS) - (tokens[k].text in CLOSERS)
            # Passed on by the lambda, these are numbers and no null pointers any more.
            if tokens[k - 1].text not in "(," or tokens[k + 1].text not in "),":
                continue
            if tokens[k].text == "NULL":
                self.change(tokens[k].start, tokens[k].end, "nullptr")
            elif ZERO.fullmatch(tokens[k].text) and not depth:
                zeros = True
                self.change(tokens[k].start, tokens[k].end, f"::kf::simt::LiteralZero<decltype({tokens[k].text})>()")
        kernel = self.flat(tokens[first].start, tokens[i - 1].end)
        name = kernel.replace("\\", "\\\\").replace('"', '\\"')
        # With a zero the launch asks whether the kernel takes numbers.
        result = f" -> decltype(static_cast<void>({kernel}(kf_args...)))" if zeros else ""
        head = f"::kf::simt::kernel_call([&](auto&... kf_args) KF_SIMT_UNINSTRUMENTED{result} {{ "
        self.change(tokens[first].start, tokens[first].start, head)
        self.change(opening.start, tokens[i + 2].end, f'(kf_args...); }}, "{name}")(')
        self.change(tokens[j].start, tokens[j + 2].end, ").launch_with_zeros" if zeros else ").launch")

    def kernel(self, tokens: list[Token], i: int, macro: bool) -> None:
        """Marks the body of the kernel whose declaration holds __global__ at token i."""
        bounds, cluster = "", ""
        j = i + 1
        parameters = False
        while j < len(tokens):
            text = tokens[j].text
            if text == "__launch_bounds__" and j + 1 < len(tokens) and tokens[j + 1].text == "(":
                end = self.closing(tokens, j + 1)
                bounds = self.first_argument(tokens, j + 1, end)
                j = end
            elif text == "__cluster_dims__" and j + 1 < len(tokens) and tokens[j + 1].text == "(":
                end = self.closing(tokens, j + 1)
                cluster = self.flat(tokens[j + 1].end, tokens[end].start)
                j = end
            elif text in ("(", "["):
                j = self.closing(tokens, j)
                parameters = True
            elif text == ";" or (text == "=" and parameters):
                return
            elif text == "{":
                argument = f", {bounds}" if bounds else ", 1024" if cluster else ""
                argument += f", ::kf::simt::dim3({cluster})" if cluster else ""
                mark = (
                    f" static ::kf::simt::KernelInfo kf_kernel(__PRETTY_FUNCTION__{argument});"
                    " ::kf::simt::enter_kernel(kf_kernel); "
                )
                self.change(tokens[j].end, tokens[j].end, mark)
                return
            j += 1
        if macro:
            raise self.error(tokens[i].start, "a macro that begins a kernel must hold the kernel's whole body")
        raise self.error(tokens[i].start, "__global__ without a function")

    def first_argument(self, tokens: list[Token], opening: int, closing: int) -> str:
        j = opening + 1
        while j < closing and tokens[j].text != ",":
            if tokens[j].kind == "op" and tokens[j].text in OPENERS:
                j = self.closing(tokens, j)
            elif (
                tokens[j].text == "<" and tokens[j - 1].kind == "word" and self.looks_like_arguments(tokens, j, closing)
            ):
                j = self.closing_angle(tokens, j)
            j += 1
        return self.flat(tokens[opening].end, tokens[j].start).strip()

    def kernel_argument(self, tokens: list[Token], i: int, position: int) -> None:
        """Takes a cast to void* off the kernel that is argument number `position` of the call at i."""
        if i + 1 >= len(tokens) or tokens[i + 1].text != "(":
            return
        end = self.closing(tokens, i + 1)
        j = i + 2
        while position > 0 and j < end:
            if tokens[j].kind == "op" and tokens[j].text in OPENERS:
                j = self.closing(tokens, j)
            elif tokens[j].text == ",":
                position -= 1
            j += 1
        if j >= end:
            return
        if tokens[j].text == "(":
            first, close = j + 1, self.closing(tokens, j)
        elif tokens[j].text in ("reinterpret_cast", "static_cast") and tokens[j + 1].text == "<":
            first, close = j + 2, self.closing_angle(tokens, j + 1)
        else:
            return
        if sorted(t.text for t in tokens[first:close] if t.text != "const") == ["*", "void"]:
            self.change(tokens[j].start, tokens[close].end, "")
