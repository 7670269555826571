"""The finished cases of a benchmark, kept beside its results file until that is written: what is cut off can go on."""

import json
import pathlib

from kernel_fusion.report import results

MUST_MATCH = ("gpu", "driver", "cuda", "torch", "commit")


class Journal:
    """Cases that were measured, with their rows, in `<results file>.partial`.

    `path`: of the results file; None keeps nothing. `resume`: take over what an earlier run finished, which must be of
    the same environment and commit; otherwise that is overwritten.
    """

    def __init__(self, path: pathlib.Path | None, environment: dict, *, resume: bool = False):
        self.path = path and path.with_name(f"{path.name}.partial")
        self.environment = environment
        self.ceilings: dict | None = None
        self.cases: dict[str, list[dict]] = {}
        if resume and self.path and self.path.exists():
            self._take_over(self.path)

    def _take_over(self, path: pathlib.Path) -> None:
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            there, ceilings, cases = before["environment"], before["ceilings"], dict(before["cases"])
        except (ValueError, KeyError, TypeError) as error:
            raise results.ResultsError(f"--resume: {path} is damaged: {error!r}") from error
        for name in MUST_MATCH:
            if there.get(name) != self.environment[name]:
                raise results.ResultsError(
                    f"--resume: {path} was measured with {name} {there.get(name)}, this is {name} "
                    f"{self.environment[name]}. Run the benchmark without --resume"
                )
        self.ceilings, self.cases = ceilings, cases

    def add(self, name: str, rows: list[dict], ceilings: dict) -> None:
        """Keeps the rows of a case that is finished, and all ceilings of the run so far."""
        self.cases[name] = rows
        self.ceilings = ceilings
        if self.path:
            contents = {"environment": self.environment, "ceilings": ceilings, "cases": self.cases}
            results.replace(self.path, results.as_text(contents))

    def close(self) -> None:
        """Forgets everything: the results are written."""
        if self.path:
            self.path.unlink(missing_ok=True)
