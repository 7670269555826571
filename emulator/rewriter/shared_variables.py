"""`__shared__` variables, which become references into the memory of the block."""

from __future__ import annotations

from .tokens import OPENERS, Token, Tokens


class SharedVariables(Tokens):
    def declaration_start(self, tokens: list[Token], i: int) -> int:
        """The first token of the declaration that holds __shared__ at token i."""
        start = i
        while start > 0:
            before = tokens[start - 1]
            if before.text == ">":
                start = self.closing_angle(tokens, start - 1, -1)
                continue
            if before.text == ")":
                opening = self.closing(tokens, start - 1, -1)
                if opening > 0 and tokens[opening - 1].text in ("alignas", "__align__", "__attribute__", "decltype"):
                    start = opening - 1
                    continue
                break
            if before.text == ":" and self.is_scope(tokens, start - 1):
                start -= 2
                continue
            if before.kind != "word" or before.text in ("else", "do"):
                break
            start -= 1
        return start

    def shared(self, tokens: list[Token], i: int, at_namespace: bool, macro: bool) -> int:
        """Rewrites the declaration that holds __shared__ at token i; returns the token after it."""
        start = self.declaration_start(tokens, i)
        end = i
        while end < len(tokens) and tokens[end].text != ";":
            if tokens[end].kind == "op" and tokens[end].text in OPENERS:
                end = self.closing(tokens, end)
            elif tokens[end].kind == "directive":
                raise self.error(tokens[end].start, "a directive within a __shared__ declaration")
            end += 1
        if end >= len(tokens) and not macro:
            raise self.error(tokens[i].start, "__shared__ declaration without ;")

        dynamic = False
        align: list[str] = []
        left: list[int] = []  # tokens of the type and the declarators
        j = start
        while j < end:
            text = tokens[j].text
            if text in ("__shared__", "static", "__device__", "thread_local"):
                pass
            elif text == "extern":
                dynamic = True
            elif text in ("alignas", "__align__") and j + 1 < end and tokens[j + 1].text == "(":
                close = self.closing(tokens, j + 1)
                align.append(self.flat(tokens[j].start, tokens[close].end))
                j = close
            elif text == "[" and tokens[j + 1].text == "[":
                j = self.closing(tokens, j)
            else:
                left.append(j)
            j += 1
        parts = [tokens[k] for k in left]
        name_at = self.declarator_name(parts, tokens[i].start)
        type_end = name_at
        while type_end > 0 and parts[type_end - 1].text == "*":
            type_end -= 1
        if type_end == 0:
            raise self.error(tokens[i].start, "__shared__ declaration without a type")

        self.names += 1
        tag = f"{self.tag}_{self.names}"
        out = f"typedef {self.spaced(parts[:type_end])} kf_b{tag};"
        written_to = parts[type_end - 1].end
        for number, (prefix, name, suffix) in enumerate(self.declarators(parts[type_end:], tokens[i].start)):
            alias = f"kf_t{tag}_{number}"
            # Line breaks stand where they stood, as far as the order of the pieces allows.
            out += "\n" * self.text.count("\n", written_to, name.start)
            written_to = suffix[-1].end if suffix else name.end
            out += f" typedef kf_b{tag} {self.spaced(prefix)}{alias}{self.spaced(suffix)};"
            if dynamic:
                if not suffix:
                    raise self.error(name.start, f"`extern __shared__` must be an array, `{name.text}` is none")
                if at_namespace:
                    out += (
                        f" [[maybe_unused]] static thread_local ::std::decay_t<{alias}> const {name.text}"
                        f" = ::kf::simt::dynamic_shared<{alias}>();"
                    )
                else:
                    out += f" {alias}& {name.text} = ::kf::simt::dynamic_shared<{alias}>();"
                continue
            if at_namespace:
                raise self.error(name.start, f"`__shared__ {name.text}` outside of a function is not supported")
            aligned = "".join(f" struct {a} A{n} {{}};" for n, a in enumerate(align))
            alignment = f"alignof({alias})"
            for n in range(len(align)):
                alignment = f"::kf::simt::max_align({alignment}, alignof(A{n}))"
            out += (
                f" {alias}& {name.text} = ::kf::simt::static_shared<{alias}>("
                f"[]() -> ::kf::simt::SharedSlot& {{{aligned}"
                f' static ::kf::simt::SharedSlot kf_slot("{name.text}", sizeof({alias}), {alignment}, __FILE__,'
                f" __LINE__); return kf_slot; }}());"
            )
        stop = tokens[end].end if end < len(tokens) else tokens[-1].end
        if macro:
            out = out.replace("\n", "\\\n")
            if end >= len(tokens):
                out = out[:-1]
        self.change(tokens[start].start, stop, self.fit(out, tokens[start].start, stop))
        return end + 1

    def declarator_name(self, parts: list[Token], at: int) -> int:
        """The index of the first declared name."""
        k = 0
        while k < len(parts):
            text = parts[k].text
            following = parts[k + 1].text if k + 1 < len(parts) else ";"
            if parts[k].kind == "word" and following in ("[", ",", ";") and k > 0:
                return k
            if text == "<" and k > 0 and parts[k - 1].kind == "word":
                k = self.closing_angle(parts, k)
            elif text in ("{", "("):
                close = self.closing(parts, k)
                if text == "(" and parts[k - 1].text not in ("decltype", "__attribute__"):
                    break
                k = close
            k += 1
        raise self.error(at, "cannot find the name in this __shared__ declaration")

    def declarators(self, parts: list[Token], at: int):
        """Splits `*a[1], b` into (prefix, name, suffix)."""
        k = 0
        while k < len(parts):
            prefix = []
            while parts[k].text == "*":
                prefix.append(parts[k])
                k += 1
            name = parts[k]
            if name.kind != "word":
                raise self.error(name.start, "cannot parse this __shared__ declaration")
            k += 1
            suffix_start = k
            while k < len(parts) and parts[k].text == "[":
                k = self.closing(parts, k) + 1
            yield prefix, name, parts[suffix_start:k]
            if k < len(parts) and parts[k].text != ",":
                what = "an initializer is not allowed" if parts[k].text == "=" else "cannot parse this"
                raise self.error(parts[k].start, f"{what} in a __shared__ declaration")
            k += 1
