"""Options of a warm start from weights of another model: other names, new, unused and reshaped tensors. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from tutti.config.spec import build_options, read_options
from tutti.errors import UsageError, did_you_mean

_FORM = "rename=OLD:NEW,new=PATTERN,unused=PATTERN,reshaped=PATTERN"


class FittedWeights(NamedTuple):
    """Differences between a model and the weights that it starts from, all of them allowed.

    Attributes:
        new: tensors of the model that the weights lack; they keep their initial values.
        unused: tensors of the weights that the model lacks.
        reshaped: tensors of the model of another shape than in the weights; they keep their initial values.
    """

    new: Sequence[str] = ()
    unused: Sequence[str] = ()
    reshaped: Sequence[str] = ()

    @property
    def kept(self) -> list[str]:
        """Names of the model's tensors that keep their initial values: those in ``new`` and ``reshaped``."""
        return [*self.new, *self.reshaped]

    def text(self) -> str:
        """Return what differs between a model and its initial weights in words; an empty string if nothing does.

        At most four tensors of each kind (new, unused, reshaped) are named.

        >>> FittedWeights(new=["head.bias", "head.weight"], unused=["lm_head.weight"]).text()
        '2 new (head.bias, head.weight); 1 unused (lm_head.weight)'
        """
        most = 4
        parts = [
            f"{len(names)} {kind} ({', '.join(names[:most])}{', …' * (len(names) > most)})"
            for kind, names in self._asdict().items()
            if names
        ]
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class InitMap:
    """How weights of another model become those of this one.

    Attributes:
        rename: ``old:new``: beginnings of names in the weights, and the model's in their place; the first that matches
            counts.
        new: name patterns of tensors that the weights may lack.
        unused: name patterns of tensors, after ``rename``, that the model may lack.
        reshaped: name patterns of tensors that may have another shape.
    """

    rename: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for item in self.rename:
            if item.count(":") != 1 or item == ":":
                raise ValueError(f"rename has '{item}', must be OLD:NEW")

    @classmethod
    def parse(cls, text: str, option: str = "--init-map") -> InitMap:
        """Parse ``key=value,…``, such as ``rename=transformer.:model.,new=head.*``.

        Args:
            text: the keys are ``rename``, ``new``, ``unused`` and ``reshaped``; several items of one key are joined by
                ``+``.
            option: name of the option, for the error.

        Raises:
            UsageError: the text is malformed, a key is unknown (naming the nearest) or repeated, or an item of
                ``rename`` is not ``OLD:NEW``.
        """
        return build_options(cls, read_options(text, option, _FORM), option)

    @classmethod
    def of(cls, text: str, init_from: object, option: str) -> InitMap:
        """Parse the options of a warm start, after checking that the run has initial weights.

        Args:
            text: as for ``parse``.
            init_from: source of the initial weights; None for none.
            option: name of the option, for the error.

        Raises:
            UsageError: ``init_from`` is None, or ``text`` is refused by ``parse``.
        """
        if init_from is None:
            raise UsageError(f"{option} does nothing without initial weights", remedy="say where they are: init_from")
        return cls.parse(text, option)

    def names(self, saved: Iterable[str]) -> dict[str, str]:
        """Apply ``rename`` to the names of saved tensors, and return the saved name of each resulting name.

        Args:
            saved: names of all tensors in the weights.

        Returns:
            Name after ``rename`` → name in the weights; a tensor that no item of ``rename`` matches maps to itself.

        Raises:
            UsageError: a beginning matches no name, or two tensors get the same name.

        >>> InitMap.parse("rename=a.:b.").names(["a.w", "c"])
        {'b.w': 'a.w', 'c': 'c'}
        """
        saved = list(saved)
        pairs = [item.split(":") for item in self.rename]
        for old, _ in pairs:
            if not any(name.startswith(old) for name in saved):
                raise UsageError(
                    f"no tensor of the weights begins with '{old}'",
                    where="init_map, rename",
                    remedy=did_you_mean(old, saved),
                )
        found: dict[str, str] = {}
        for name in saved:
            old, new = next((pair for pair in pairs if name.startswith(pair[0])), ("", ""))
            other = new + name.removeprefix(old)
            if other in found:
                raise UsageError(f"{found[other]} and {name} would both be {other}", where="init_map, rename")
            found[other] = name
        return found

    def fit(
        self,
        own: Mapping[str, Sequence[int]],
        tied: Mapping[str, Sequence[str]],
        saved: Mapping[str, Sequence[int]],
    ) -> FittedWeights:
        """Compare the tensors of the model with saved ones, and return the differences that these options allow.

        A difference that no pattern allows is not returned, and is for the caller to find.

        Args:
            own: shape of each tensor of the model, by its first name.
            tied: the other names of each tensor that has several (tied weights), by its first name.
            saved: shape of each saved tensor, by its name after ``rename``.

        Raises:
            UsageError: a pattern matches no name.
        """
        known = {other: name for name in own for other in (name, *tied.get(name, ()))}
        for option, patterns, names in (
            ("new", self.new, known), ("unused", self.unused, saved), ("reshaped", self.reshaped, known),
        ):  # fmt: skip
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    whose = "weights" if option == "unused" else "model"
                    raise UsageError(
                        f"no tensor of the {whose} matches '{pattern}'",
                        where=f"init_map, {option}",
                        remedy=did_you_mean(pattern, names),
                    )
        missing = [name for name in own if not {name, *tied.get(name, ())} & saved.keys()]
        shapes = {known[name]: shape for name, shape in saved.items() if name in known}
        return FittedWeights(
            [name for name in sorted(missing) if _matches(name, self.new)],
            [name for name in sorted(saved.keys() - known.keys()) if _matches(name, self.unused)],
            [n for n in sorted(shapes) if tuple(shapes[n]) != tuple(own[n]) and _matches(n, self.reshaped)],
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
