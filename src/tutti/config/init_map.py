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
        new: names of the model's tensors that the weights lack; they keep their initial values.
        unused: names of tensors of the weights that the model lacks.
        reshaped: names of the model's tensors of another shape than in the weights; they keep their initial values.
    """

    new: Sequence[str] = ()
    unused: Sequence[str] = ()
    reshaped: Sequence[str] = ()

    @property
    def kept(self) -> list[str]:
        """Names of the model's tensors that a warm start leaves at their initial values.

        A new list: first the tensors that the saved weights lack (``new``), then the tensors that have another shape
        there (``reshaped``).
        """
        return [*self.new, *self.reshaped]

    def text(self) -> str:
        """Return one line of text on the differences between a model and its initial weights; empty without any.

        The line counts the tensors of each kind (new, unused, reshaped) and names at most four of each.

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
    """Options of a warm start: renames of saved weights, and the tensors in which they may differ from the model.

    Attributes:
        rename: items ``old:new``: a tensor of the weights whose name begins with ``old`` gets ``new`` in its place; the
            first item that matches counts.
        new: name patterns of tensors that the weights may lack.
        unused: name patterns of tensors, after ``rename``, that the model may lack.
        reshaped: name patterns of tensors that may have another shape.

    Raises:
        ValueError: an item of ``rename`` is not ``OLD:NEW``.
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
        """Parse ``--init-map``, renames and allowed differences of weights to load: ``rename=transformer.:model.``.

        Args:
            text: ``key=value,…``; several items of one key are joined by ``+``. ``rename``: ``OLD:NEW``, the beginning
                of names in the weights and in the model. Shell patterns of tensor names: ``new``, that the weights may
                lack; ``unused``, that the model may lack; ``reshaped``, whose shapes may differ.
            option: name of the option, which a UsageError states.

        Returns:
            An ``InitMap``, whose attributes ``rename``, ``new``, ``unused`` and ``reshaped`` are tuples of texts, the
            items of each key.

        Raises:
            UsageError: the text is malformed, a key is unknown (naming the nearest) or repeated, or an item of
                ``rename`` is not ``OLD:NEW``.
        """
        return build_options(cls, read_options(text, option, _FORM), option)

    @classmethod
    def of(cls, text: str, init_from: object, option: str) -> InitMap:
        """Parse ``--init-map``, renames and allowed differences of weights to load, if the run loads weights.

        Args:
            text: ``key=value,…`` with the keys ``rename``, ``new``, ``unused`` and ``reshaped``, such as
                ``rename=transformer.:model.,new=head.*``.
            init_from: location of the run's initial weights (``--init-from``); None if the run loads none.
            option: name of the option, which a UsageError states.

        Returns:
            An ``InitMap``, whose attributes ``rename``, ``new``, ``unused`` and ``reshaped`` are tuples of texts, the
            items of each key.

        Raises:
            UsageError: ``init_from`` is None, the text is malformed, a key is unknown (naming the nearest) or repeated,
                or an item of ``rename`` is not ``OLD:NEW``.
        """
        if init_from is None:
            raise UsageError(f"{option} does nothing without initial weights", remedy="say where they are: init_from")
        return cls.parse(text, option)

    def names(self, saved: Iterable[str]) -> dict[str, str]:
        """Rename saved tensors by the items ``OLD:NEW`` of ``rename``, which replace beginnings of names.

        Of several items that match a name, the first one counts.

        Args:
            saved: names of all tensors in the weights.

        Returns:
            A dict with an entry for each saved tensor: its new name → its name in the weights. Both are equal if no
            item matches the name.

        Raises:
            UsageError: no name begins with the ``OLD`` of an item, or two tensors get the same name.

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
                raise UsageError(
                    f"{found[other]} and {name} would both be {other}",
                    where="init_map, rename",
                    remedy="rename one of them to another name",
                )
            found[other] = name
        return found

    def fit(
        self,
        own: Mapping[str, Sequence[int]],
        tied: Mapping[str, Sequence[str]],
        saved: Mapping[str, Sequence[int]],
    ) -> FittedWeights:
        """Compare the tensors of a model with saved ones, and return the differences that ``--init-map`` allows.

        ``--init-map`` lists shell patterns of tensor names under the keys ``new``, ``unused`` and ``reshaped``.

        Args:
            own: shape of each tensor of the model by its name, of tied weights by the first of their names.
            tied: the other names of tied weights, by the first. The saved weights may have a tied weight under any of
                its names, and a pattern of ``new`` or ``reshaped`` may match any of them to name a tensor at all.
            saved: shape of each saved tensor, by its name in the model (the caller has applied ``rename``).

        Returns:
            A ``FittedWeights`` of three lists: names of tensors that the saved weights lack (``new``), that the model
            lacks (``unused``), and whose shapes differ (``reshaped``). A tied weight is listed by its first name. A
            name is listed only if a pattern of that key matches the name. Other differences are left out, and raise no
            error here.

        Raises:
            UsageError: a pattern of ``new`` or ``reshaped`` matches no tensor of the model, or a pattern of ``unused``
                no saved tensor.
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
