"""The game of the example: the policy guesses a number, and is told whether it is higher or lower."""

from collections.abc import Iterator

from rpg_megatron.rollout.episode import Episode, EpisodeTask, Generate, ScoreText

LARGEST = 50
PROMPT = f"A number from 01 to {LARGEST}.\n"
REPLIES = {True: "\nhigher\n", False: "\nlower\n"}
"""By whether the number is higher than the guess."""
NO_NUMBER = "\na number, please\n"


def numbers() -> Iterator[dict[str, object]]:
    """The numbers to guess, as a source of prompts."""
    for number in range(1, LARGEST + 1):
        yield {"prompt": PROMPT, "answer": number}


async def play(task: EpisodeTask, generate: Generate, score: ScoreText, turns: int = 7) -> Episode:
    """A game of at most so many turns; the reward is larger the earlier the number is found, else 0."""
    number, context, failed = int(task.answer), task.prompt, 0
    for turn in range(turns):
        guess = await generate(context, max_tokens=4)
        text = guess.text.strip()
        if text.isdecimal() and int(text) == number:
            return Episode(1.0 - 0.1 * turn, {"no_number": failed})
        failed += not text.isdecimal()
        reply = REPLIES[number > int(text)] if text.isdecimal() else NO_NUMBER
        context = guess.context + task.encode(reply)
    return Episode(0.0, {"no_number": failed})
