"""Parse durations (``3ep``) and specifications (``name:key=value,…``).

The same text works as a flag, as a TOML value and as a Python argument. No torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Literal, Self, TypeVar, cast, get_args, get_origin

from tutti.errors import UsageError, did_you_mean

T = TypeVar("T")

Unit = Literal["ep", "st", "sa"]
_LONGEST = 1e15
_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)(ep|st|sa)")


@dataclass(frozen=True)
class Duration:
    """A length of training: epochs (``3ep``), steps (``500st``) or samples (``20000sa``).

    >>> Duration.parse("3ep").steps(dataset=1000, batch=128)
    24
    >>> Duration.parse("20000sa").steps(dataset=1000, batch=128)
    160
    >>> Duration.parse("500st").steps(dataset=1000, batch=128)
    500

    Attributes:
        value: number of epochs, steps or samples.
        unit: ``ep`` (epochs), ``st`` (steps) or ``sa`` (samples).
    """

    value: float
    unit: Unit

    @classmethod
    def parse(cls, text: str, option: str = "duration") -> Duration:
        """Parse a length of training, a number and its unit: ``3ep`` epochs, ``500st`` steps or ``20000sa`` samples.

        Args:
            text: the duration; only epochs may have a fraction, as in ``0.5ep``.
            option: name of the option, which a UsageError states.

        Returns:
            A ``Duration``: ``value``, a float, and ``unit``, one of the texts ``ep``, ``st`` and ``sa``.

        Raises:
            UsageError: the text has another form, is a fraction of a step or sample, or is longer than any run.
        """
        match = _DURATION.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"cannot read '{text}' as a duration", where=option, remedy="write 3ep, 500st or 20000sa")
        value, unit = float(match[1]), match[2]
        if value > _LONGEST:
            raise UsageError(f"'{text}' is longer than any run", where=option, remedy=f"give at most {_LONGEST:g}")
        if unit != "ep" and value != int(value):
            units = "steps" if unit == "st" else "samples"
            raise UsageError(
                f"'{text}' is not a whole number of {units}", where=option, remedy="round it, or count in epochs"
            )
        return cls(value, typing.cast(Unit, unit))

    def steps(self, dataset: int | None, batch: int | Fraction) -> int:
        """Convert a length of training, in epochs, steps or samples, to a number of optimizer steps.

        An epoch's last, smaller batch counts as a step.

        Args:
            dataset: samples in one epoch; None for a stream of unknown length.
            batch: number of samples in one global batch. Or, for steps of a single logical worker, in the worker's
                fixed share of the global batch, which may be a fraction.

        Returns:
            The number of steps, a whole number. A part of an epoch is rounded to the nearest step, and may so become 0
            steps; samples that do not fill a batch count as a step.

        Raises:
            UsageError: the duration is in epochs, and ``dataset`` is None.
        """
        if self.unit == "st":
            return int(self.value)
        if dataset is None:
            if self.unit == "ep":
                raise UsageError(
                    f"{self} of a stream of unknown length cannot be converted to steps",
                    remedy="count in steps (500st) or samples (20000sa), or give the data set __len__",
                )
            return math.ceil(self.value / batch)
        per_epoch = math.ceil(dataset / batch)
        if self.unit == "ep":
            return round(self.value * per_epoch)
        epochs, rest = divmod(int(self.value), dataset)
        return epochs * per_epoch + math.ceil(rest / batch)

    def __str__(self) -> str:
        return f"{self.value:.15g}{self.unit}"


@dataclass(frozen=True)
class Spec:
    """``name:key=value,…`` split into name and options; the keys are not yet checked.

    >>> Spec.parse("sgd:lr=0.1,momentum=0.9")
    Spec(name='sgd', options={'lr': '0.1', 'momentum': '0.9'})

    Attributes:
        name: the text before the colon.
        options: value of each key as text.
    """

    name: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str, option: str = "specification") -> Spec:
        """Parse ``name:key=value,…`` or ``name`` alone, without checking name and keys.

        Args:
            text: the specification; dashes in keys become underscores.
            option: name of the option, which a UsageError states.

        Returns:
            A ``Spec``: ``name``, and ``options``, a mapping from each key to its value as text, empty for a name alone.

        Raises:
            UsageError: there is no name, an item is not ``key=value``, or a key is repeated.
        """
        name, _, rest = text.strip().partition(":")
        options = read_options(rest, option, "name:key=value,key=value")
        if not name:
            raise UsageError(f"'{text}' has no name", where=option, remedy="write name:key=value")
        return cls(name.strip(), options)

    def choose(self, table: Mapping[str, T], option: str) -> T:
        """Look up the name of this specification, ``name:key=value,…``, in ``table`` and return its entry.

        Args:
            table: entries by possible name.
            option: kind of the entries, such as ``strategy``, which a UsageError states.

        Raises:
            UsageError: the table has no such name; the error proposes the nearest.
        """
        if self.name not in table:
            raise UsageError(f"unknown {option} '{self.name}'", remedy=did_you_mean(self.name, table))
        return table[self.name]

    def changed(self, **options: object) -> Spec:
        """Return a specification with other values of some keys, or further keys.

        Args:
            options: values by key, which are written as ``str`` writes them; None removes a key.

        >>> str(Spec.parse("pipeline:stages=2,schedule=1f1b").changed(stages=4, schedule=None))
        'pipeline:stages=4'
        """
        merged = {**self.options, **options}
        return Spec(self.name, {key: str(value) for key, value in merged.items() if value is not None})

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    def build(self, config: type[T], option: str) -> T:
        """Build an instance of the dataclass ``config`` from the parsed ``key=value`` texts, converted to field types.

        Args:
            config: the dataclass, whose fields are the possible keys.
            option: kind of the specification, such as ``strategy``; errors state it before this specification's name.

        Returns:
            The instance; fields without a key have their defaults.

        Raises:
            UsageError: unknown key (naming the nearest), a value of the wrong type, a required field without a key, or
                values that the dataclass refuses (its ValueError or TypeError becomes a UsageError).
        """
        return build_options(config, self.options, f"{option} {self.name}")


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Base class of the dataclasses that hold a strategy's options, as parsed from ``--strategy``.

    Methods and properties derive facts from the options, such as sizes of the device mesh's dimensions. Those of this
    class hold for a strategy without options; subclasses override them.
    """

    def capabilities(self) -> dict[str, Any]:
        """Return capabilities of the strategy that depend on its options, by name, such as ``{"reproducible": False}``.

        Called when ``--strategy`` is parsed. A capability says what the strategy can do, such as to give the same bits
        on any number of ranks. Names are fields of ``Strategy`` in ``config/strategy_table.py``; the returned values
        replace those that the table has for the strategy. Empty by default.
        """
        return {}

    @property
    def variant(self) -> str | None:
        """Name of the gradient synchronisation that these options choose; None for the usual one of the strategy.

        A gradient synchronisation is the class that reduces gradients over ranks and makes the updates. The name is
        part of a key of ``SYNCS`` in ``parallel/registry.py``, which maps it to the class. None by default.
        """
        return None

    def resolve_durations(self, steps: Callable[[Duration], int]) -> Self:
        """Return the strategy's options with every duration, such as ``2ep``, as a number of steps (``500st``).

        Called on each rank once the number of steps in an epoch is known. By default no option is a duration, and the
        options are returned as they are.

        Args:
            steps: maps a duration to its number of steps in this run.

        Returns:
            The options, of the same class.
        """
        return self

    @property
    def extents(self) -> Mapping[str, int | None]:
        """Sizes of the device mesh's dimensions that the strategy's options set, by option; empty by default.

        A mapping from the name of an option to a number of ranks along the dimension. Possible keys are ``replicas``,
        ``shards``, ``stages`` and ``tensor``. None stands for a size that follows from the number of devices.
        """
        return {}

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the strategy: 1 shards optimizer state, 2 gradients too, 3 parameters too; 0 shards nothing.

        Read by predictions of memory and step time. 0 by default.
        """
        return 0

    @property
    def wrap_policy(self) -> tuple[str, ...]:
        """FSDP wrap policy: names or class names of the modules whose parameters are gathered together.

        ``("auto",)``, the default: the modules are chosen automatically. Read by predictions of memory.
        """
        return ("auto",)

    def shards_parameters(self, shape: Mapping[str, int]) -> bool:
        """Return whether parameters are sharded over data-parallel ranks (FSDP2) on a device mesh; False by default.

        Args:
            shape: size of each dimension of the device mesh, by name: ``replica``, ``shard``, ``stage`` and ``tensor``.
        """
        return False

    def check(self, shape: Mapping[str, int], accelerated: bool, compiled: bool) -> None:
        """Raise UsageError if the strategy's options conflict with the device mesh, the devices or ``torch.compile``.

        Called before any rank starts. The base class checks nothing.

        Args:
            shape: size of each dimension of the device mesh, by name: ``replica``, ``shard``, ``stage`` and ``tensor``.
            accelerated: whether devices are accelerators.
            compiled: whether the run uses ``--compile``.
        """


def read_options(text: str, option: str, form: str) -> dict[str, str]:
    """Parse ``key=value,key=value`` into a dict of texts by key.

    Args:
        text: the options; dashes in keys become underscores.
        option: name of the option, which a UsageError states.
        form: the expected form, such as ``name:key=value``, which a UsageError states.

    Raises:
        UsageError: the text is malformed, or a key is repeated.
    """
    options: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise UsageError(f"cannot read '{item}' in '{text}'", where=option, remedy=f"write {form}")
        key = key.strip().replace("-", "_")
        if key in options:
            raise UsageError(f"'{key}' is given twice in '{text}'", where=option, remedy="give it once")
        options[key] = value.strip()
    return options


@cache
def _hints(config: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    return typing.get_type_hints(config)


def build_options(config: type[T], options: Mapping[str, Any], where: str) -> T:
    """Build an instance of the dataclass ``config`` from options given by name.

    Args:
        config: the dataclass.
        options: field values; text is converted to the field's type, other values are passed on unchecked.
        where: text that says in error messages where the options were given, such as ``--slow``.

    Returns:
        The instance; fields that ``options`` does not name have their defaults.

    Raises:
        UsageError: unknown key (naming the nearest), a value of the wrong type, a required field that is not given, or
            values that the dataclass refuses (its ValueError or TypeError becomes a UsageError).
    """
    hints = _hints(cast(Any, config))
    fields = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    values = {}
    for key, value in options.items():
        if key not in fields:
            known = did_you_mean(key, fields) if fields else "leave it out: there are no options"
            raise UsageError(f"unknown option '{key}'", where=where, remedy=known)
        values[key] = _convert(value, hints[key], f"{where}, {key}") if isinstance(value, str) else value
    needed = [field.name for field in dataclasses.fields(config) if _is_needed(field)]  # type: ignore[arg-type]
    if missing := next((name for name in needed if name not in values), None):
        raise UsageError(f"the option '{missing}' is missing", where=where, remedy=f"give {missing}=…")
    try:
        return config(**values)
    except (TypeError, ValueError) as error:
        raise UsageError("invalid options", where=where, why=str(error)) from error


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field of a dataclass must be given to its constructor."""
    without = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    return field.init and without


_BOOLEANS = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}


def _convert(text: str, hint: Any, where: str) -> Any:
    """Convert ``text`` to type ``hint``.

    ``hint`` is bool, int, float, str, a Literal, ``X | None``, ``bool | Literal``, ``tuple[X, …]`` (items after ``+``),
    ``tuple[tuple[X, …], …]`` (lists of them after ``/``) or a number or such lists.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        named = [word for each in arguments if get_origin(each) is Literal for word in get_args(each)]
        if text in named:
            return text
        optional = type(None) in arguments
        if optional and text.lower() == "none":
            return None
        if bool in arguments and text.lower() not in _BOOLEANS:
            choices = ("true", "false", *named, *["none"] * optional)
            raise UsageError(f"'{text}' is not possible", where=where, remedy=did_you_mean(text, choices))
        kinds = [a for a in arguments if a is not type(None)]
        lists = next((kind for kind in kinds if get_origin(kind) is tuple), None)
        return _convert(text, kinds[0] if lists is None or "/" not in text else lists, where)
    if origin is tuple:
        separator = "/" if get_origin(arguments[0]) is tuple else "+"
        return tuple(_convert(part, arguments[0], where) for part in text.split(separator))
    if origin is Literal:
        if text not in arguments:
            raise UsageError(f"'{text}' is not possible", where=where, remedy=did_you_mean(text, arguments))
        return text
    if hint is bool:
        if text.lower() not in _BOOLEANS:
            raise UsageError(f"'{text}' is neither true nor false", where=where)
        return _BOOLEANS[text.lower()]
    try:
        value = hint(text)
    except ValueError:
        raise UsageError(f"'{text}' is not {_article(hint)}", where=where) from None
    if hint is float and not math.isfinite(value):
        raise UsageError(f"'{text}' is not a finite number", where=where)
    return value


def _article(hint: Any) -> str:
    return {"int": "a whole number", "float": "a number"}.get(getattr(hint, "__name__", ""), str(hint))
