"""What a vLLM server says of itself at /metrics, as far as an A/B asks: requests, tokens, and two latencies."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from ..settings import ConfigurationError

PATIENCE_S: Final = 10.0
_MOST_BYTES: Final = 64 << 20
# The first of each that a server has. V0 and V1 of 0.8 to 0.33 agree but for the last: 0.10.2 named it anew, and some
# releases after it still had both.
REQUESTS: Final = ("vllm:request_success",)
TOKENS: Final = ("vllm:generation_tokens",)
TTFT: Final = ("vllm:time_to_first_token_seconds",)
ITL: Final = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
_FAMILIES: Final = (*REQUESTS, *TOKENS, *TTFT, *ITL)


class NoMetrics(Exception):
    """A server did not answer, or not with vLLM's metrics; the text says which and why."""


@dataclass(frozen=True)
class Histogram:
    """`below[bound]`: how many observations were at most `bound`, in seconds."""

    count: float = 0.0
    seconds: float = 0.0
    below: Mapping[float, float] = field(default_factory=dict)

    def plus(self, other: Histogram, sign: int = 1) -> Histogram:
        bounds = sorted({*self.below, *other.below})
        below = {bound: self.below.get(bound, 0.0) + sign * other.below.get(bound, 0.0) for bound in bounds}
        return Histogram(self.count + sign * other.count, self.seconds + sign * other.seconds, below)

    @property
    def mean(self) -> float | None:
        return self.seconds / self.count if self.count > 0 else None


@dataclass(frozen=True)
class Sample:
    """The counters of all API servers at monotonic time `at`, or what they counted in `elapsed` between two times."""

    at: float
    requests: float
    tokens: float
    ttft: Histogram
    itl: Histogram

    def since(self, before: Sample) -> Sample:
        """`at` is the time between. Raises NoMetrics where a counter went back: a server was started again."""
        found = Sample(
            self.at - before.at,
            self.requests - before.requests,
            self.tokens - before.tokens,
            self.ttft.plus(before.ttft, -1),
            self.itl.plus(before.itl, -1),
        )
        if min(found.requests, found.tokens, found.ttft.count, found.itl.count) < 0:
            raise NoMetrics("the server's counters went back: it was started again")
        return found


def addresses(urls: Iterable[str]) -> list[str]:
    """Where the metrics of each server are. Raises ConfigurationError."""
    found = []
    for url in urls:
        try:
            parts = urlsplit(url)
        except ValueError:  # brackets that do not match
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigurationError(f"ab --url {url!r}; expected an address as in http://127.0.0.1:8000")
        found.append(url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/metrics")
    return found


def sample(urls: Sequence[str], patience_s: float = PATIENCE_S) -> Sample:
    """Of all `urls` together. Raises NoMetrics."""
    start = time.monotonic()
    texts = [_read(url, patience_s) for url in urls]
    at = (start + time.monotonic()) / 2
    samples = [parse(text, url, at) for url, text in zip(urls, texts, strict=True)]
    whole = samples[0]
    for one in samples[1:]:
        whole = Sample(
            at,
            whole.requests + one.requests,
            whole.tokens + one.tokens,
            whole.ttft.plus(one.ttft),
            whole.itl.plus(one.itl),
        )
    return whole


def parse(text: str, url: str, at: float) -> Sample:
    """The exposition `text` of a server: all engines and models of it together. Raises NoMetrics."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise NoMetrics(f"{error}; expected prometheus-client, which comes with vLLM") from None
    ours = "\n".join(line for line in text.splitlines() if line.removeprefix("# TYPE ").startswith(_FAMILIES))
    values: dict[str, float] = {}
    below: dict[str, dict[float, float]] = {}
    try:
        for family in text_string_to_metric_families(ours + "\n"):
            for one in family.samples:
                if one.name.endswith("_bucket"):
                    bounds = below.setdefault(family.name, {})
                    bound = float(one.labels["le"])
                    bounds[bound] = bounds.get(bound, 0.0) + one.value
                else:
                    values[one.name] = values.get(one.name, 0.0) + one.value
    except (ValueError, KeyError) as error:
        raise NoMetrics(f"{url}: {error}; expected metrics in Prometheus's text format") from None

    def histogram(names: Sequence[str]) -> Histogram:
        name = next((name for name in names if f"{name}_count" in values), names[0])
        return Histogram(
            values.get(f"{name}_count", 0.0),
            values.get(f"{name}_sum", 0.0),
            {bound: number for bound, number in sorted(below.get(name, {}).items()) if not math.isinf(bound)},
        )

    if not any(name.startswith(_FAMILIES) for name in values):
        raise NoMetrics(f"{url}: none of vLLM's metrics; expected those of a server without --disable-log-stats")
    return Sample(at, _counter(values, REQUESTS), _counter(values, TOKENS), histogram(TTFT), histogram(ITL))


def _counter(values: Mapping[str, float], names: Sequence[str]) -> float:
    return next((values[f"{name}_total"] for name in names if f"{name}_total" in values), 0.0)


def _read(url: str, patience_s: float) -> str:
    try:
        with urllib.request.urlopen(url, timeout=patience_s) as response:
            content = response.read(_MOST_BYTES)
            if response.length:  # what is still to come
                raise http.client.IncompleteRead(content, response.length)
            return str(content.decode(errors="replace"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoMetrics(f"{url} did not answer: {getattr(error, 'reason', error)}") from None
