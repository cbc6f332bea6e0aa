"""Requests whose prompts come again and again, from as many clients as there are prompts; until told to end.

    python bench/prefix_load.py --url http://127.0.0.1:8000 --model NAME --times FILE

Each client asks for its own prompt as soon as it has been answered. Where the prompts' KV blocks fit the CPU's cache
and not the GPU's, every request loads all blocks of its prompt. FILE gets the unix time of each answer, one a line.
Standard library only. Ends by itself after --seconds, at SIGTERM, or when the server is gone; exit status 1 if a
request was answered with an error.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt")
    parser.add_argument("--vocabulary", type=int, default=100_000)
    parser.add_argument("--new-tokens", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="each client asks so often, and no more")
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    load = Load(options, stop)
    threads = [threading.Thread(target=load.ask, args=(number,), daemon=True) for number in range(options.prompts)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + options.seconds
    while any(thread.is_alive() for thread in threads) and not stop.is_set() and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join(30)
    options.times.write_text("".join(f"{moment:.6f}\n" for moment in sorted(load.answered)))
    print(f"{len(load.answered)} requests answered", *load.errors[:3], sep="\n", flush=True)
    return 1 if load.errors else 0


class Load:
    def __init__(self, options: argparse.Namespace, stop: threading.Event) -> None:
        self._options = options
        self._stop = stop
        self._address = urlsplit(options.url)
        self.answered: list[float] = []
        self.errors: list[str] = []

    def ask(self, number: int) -> None:
        body = self._body(number)
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=60)
        left = self._options.rounds
        while not self._stop.is_set() and left != 0:
            try:
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                text = answer.read()
            except (OSError, http.client.HTTPException) as error:
                if not self._stop.is_set():
                    self.errors.append(f"{type(error).__name__}: {error}")
                return
            if answer.status != 200:
                self.errors.append(f"{answer.status}: {text[:300]!r}")
                return
            self.answered.append(time.time())
            left = None if left is None else left - 1

    def _body(self, number: int) -> bytes:
        numbers = random.Random(number)
        first = min(1000, self._options.vocabulary // 2)
        prompt = [numbers.randrange(first, self._options.vocabulary) for _ in range(self._options.tokens)]
        return json.dumps(
            {
                "model": self._options.model,
                "prompt": prompt,
                "max_tokens": self._options.new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
        ).encode()


if __name__ == "__main__":
    sys.exit(main())
