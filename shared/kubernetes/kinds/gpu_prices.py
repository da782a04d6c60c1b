"""Prices of GPUs, from a file such as a mounted ConfigMap."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.kubernetes.strict_yaml import load_document
from shared.model.bounds import cut
from shared.model.devices.device import longest_name_in
from shared.model.errors import RequestError

MOST_BYTES = 65_536
MOST_PRICE = 1_000_000


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of a GPU for an hour, for models whose name contains the key, or `*`.

    >>> prices = Prices(currency="EUR", models={"A100": Decimal("2.50"), "*": Decimal(1)})
    >>> prices.of("NVIDIA A100-SXM4-80GB"), prices.of("Tesla T4")
    (Fraction(5, 2), Fraction(1, 1))
    """

    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}\Z")]
    models: Annotated[Mapping[Annotated[str, Meta(max_length=100)], Decimal], Meta(max_length=500)]

    def of(self, model: str) -> Fraction | None:
        """Return the price by the longest name in the model."""
        price = self.models.get(longest_name_in(model, self.models) or "*")
        return None if price is None else Fraction(price)

    def refusal(self, currency: str) -> str:
        """Return "" if budgets in this currency can be charged."""
        if self.currency != currency:
            return f"there are no prices in {currency}, but in {self.currency or 'no currency'}"
        return "" if "*" in self.models else "no price of * applies to models without a price"


def load_prices(path: Path) -> Prices:
    """Raises RequestError."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from error
    if len(text) > MOST_BYTES:
        raise RequestError(f"{path} has more than {MOST_BYTES} bytes")
    try:
        prices = msgspec.convert(load_document(text.decode()), Prices)
    except ValueError as error:
        advice = "write `currency: EUR` and `models: {A100: 2.50}`, a GPU's price for an hour"
        raise RequestError(f"{path}: {error}; {advice}") from error
    for name, price in prices.models.items():
        if not (price.is_finite() and 0 <= price <= MOST_PRICE and price == round(price, 6)):
            raise RequestError(
                f"{path}: the price of {name}, {price}, is not from 0 to {MOST_PRICE} with six "
                "decimals"
            )
    return prices


@dataclass(slots=True)
class PriceFile:
    """The last valid prices stay in force."""

    path: Path | None = None
    prices: Prices = field(default_factory=lambda: Prices(currency="", models={}))
    problem: str = ""

    def read(self) -> Prices:
        if self.path is not None and self.path.exists():
            try:
                self.prices = load_prices(self.path)
                self.problem = ""
            except RequestError as error:
                self.problem = f"{cut(str(error))}; the last valid prices stay in force"
        return self.prices
