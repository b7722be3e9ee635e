"""Six real prompts, and how each of them is decoded: plainly, as the router decides, and speculatively."""

import secrets
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from cluster.waterfall import plan_in_words
from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.errors import EngineError
from paceline.types import Mode

FORCED_DRAFTER, FORCED_K = "cascade", 4
"""Where the router decides for plain decoding, speculation is shown beside it with these."""


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and what kind of work it is."""

    title: str
    prompt: str


TASKS = (
    Task(
        "summarise",
        "Summarise the text in two sentences.\n\n"
        "The harbour of Lindholm froze in January for the first time in forty years. Fishing boats stayed in port "
        "for three weeks, and the fish market closed its doors. The town paid every crew a small daily sum so that "
        "nobody had to sell a boat. When the ice broke in February, the first boat to leave was the oldest one, the "
        "Maren, built in 1931.",
    ),
    Task(
        "extract to JSON",
        "Extract the order as JSON with the keys customer, item, quantity, city.\n\n"
        "Text: Ingrid Solberg from Trondheim ordered 12 wool blankets.\n"
        'JSON: {"customer": "Ingrid Solberg", "item": "wool blankets", "quantity": 12, "city": "Trondheim"}\n\n'
        "Text: Tomas Novak from Brno ordered 30 copper kettles.\nJSON:",
    ),
    Task(
        "rewrite",
        "Rewrite the text without spelling mistakes. Change nothing else.\n\n"
        "Text: The workshop opens on 4 March and closses on 9 March. Registration for the workshop ends on "
        "20 February. The fee for the workshop is 40 euros and includes lunch on both days.",
    ),
    Task(
        "question answering",
        "Answer the question from the text.\n\n"
        "Text: The Alma bridge was planned by the engineer Rosa Quint and opened in 1908. It is 212 metres long and "
        "carries two tram lines. Its four stone towers were rebuilt after the flood of 1951.\n\n"
        "Question: Who planned the Alma bridge, and how long is it?",
    ),
    Task(
        "code",
        "Rename the function to rolling_mean. Give the complete code.\n\n"
        "```python\n"
        "def moving_average(values, window):\n"
        "    total = sum(values[:window])\n"
        "    averages = [total / window]\n"
        "    for index in range(window, len(values)):\n"
        "        total += values[index] - values[index - window]\n"
        "        averages.append(total / window)\n"
        "    return averages\n"
        "```",
    ),
    Task(
        "creative writing",
        "Write the opening of a short story about a lighthouse keeper who receives a letter from the future.",
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One decoding of one prompt."""

    started: Started
    finished: Finished
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A task decoded plainly, as the router decides, and speculatively; the last two may be one run."""

    task: Task
    plain: Run
    automatic: Run
    speculative: Run

    @property
    def first_difference(self) -> int | None:
        """Index of the first output token that differs between the runs; None when all are the same."""
        for other in (self.automatic.token_ids, self.speculative.token_ids):
            if other != self.plain.token_ids:
                pairs = zip(self.plain.token_ids, other, strict=False)
                shorter = min(len(self.plain.token_ids), len(other))
                return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
        return None


async def compare(client: Client, task: Task, console: Console, max_tokens: int) -> Comparison:
    """All runs of one task, streamed to ``console``."""
    console.print()
    console.rule(task.title, align="left", characters="-")
    plain = await decode(
        client, task.prompt, max_tokens, mode=Mode.PLAIN, console=console, label="asked for:"
    )
    automatic = await decode(client, task.prompt, max_tokens, console=console, label="automatic:")
    speculative = automatic
    if automatic.finished.plan.mode is Mode.PLAIN:
        speculative = await decode(
            client, task.prompt, max_tokens, mode=Mode.SPECULATIVE, console=console, label="asked for:"
        )
    return Comparison(task, plain, automatic, speculative)


async def decode(
    client: Client,
    prompt: str,
    max_tokens: int,
    *,
    mode: Mode | None = None,
    console: Console | None = None,
    label: str = "",
) -> Run:
    """One answer, streamed to ``console`` as it comes."""
    forced = mode is Mode.SPECULATIVE
    request = generate_request(
        messages=[("user", prompt)],
        temperature=0.0,
        max_tokens=max_tokens,
        tenant=secrets.token_hex(8),  # a prompt in memory from the run before would flatter the second one
        mode=mode,
        drafter=FORCED_DRAFTER if forced else None,
        k=FORCED_K if forced else None,
    )
    started: Started | None = None
    finished: Finished | None = None
    token_ids: list[int] = []
    async for event in client.generate(request):
        match event:
            case Started():
                started = event
                if console:
                    reason = f" ({event.plan.reason})" if mode is None else ""
                    decision = escape(plan_in_words(event.plan) + reason)
                    console.print(f"[bold]{label}[/bold] [dim]{decision}[/dim]")
            case Chunk():
                token_ids += event.token_ids
                if console:
                    console.out(event.text, end="", highlight=False)
            case Finished():
                finished = event
                if console:
                    console.out("")
    if started is None or finished is None:
        raise EngineError("the stream had no beginning or no end")
    return Run(started, finished, tuple(token_ids))
