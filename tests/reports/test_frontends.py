"""Reports on chat front-ends and voice, on templates, and on prompts that many sessions share.

About proxy.core.normalise and proxy.core.explain; bug-reports section C and rows 36, 63 and 65.
"""

from __future__ import annotations

import orjson
import pytest

from proxy.core.explain import Cold, quoted, rendered_difference
from proxy.core.template import Traits
from tests.reports.kit import Explained, Trigger, Turn, holds, last, named, played, why
from tests.unit.core.normalise.kit import Desk, Message, assistant, sent, system, user

# The latest message carries the time and the history does not: the model case of a sticky note.


def stamped(text: str, minute: int) -> Message:
    """AnythingLLM's newest message."""
    return user(f"{text}\n\nCurrent date and time: Monday, October 12, 2026, 2:{minute} PM")


LLM = "Given the following conversation, relevant context, and a follow up question, reply.\n"


def appended(*answers: str) -> list[Turn]:
    """Three questions, the time behind the newest only."""
    history: list[Message] = [system(LLM)]
    turns = []
    for question, minute, answer in zip(
        ("Hi.", "Why?", "When?"), (31, 32, 47), answers, strict=True
    ):
        turns.append(Turn({"messages": [*history, stamped(question, minute)]}, assistant(answer)))
        history += [user(question), assistant(answer)]
    return turns


WORDY = (
    "Hello! What would you like to know about the documents in this workspace?",
    "Because.",
    "Now.",
)


def at_the_top(minute: int, *history: Message) -> Turn:
    """Before its repair: in the system prompt."""
    now = f"The current date and time is 10/12/2026, 2:{minute}:07 PM. {LLM}"
    return Turn({"messages": [system(now), *history]}, assistant("Hello."))


WITH_A_NOTE = [
    Trigger(
        36,
        "Mintplex-Labs/anything-llm#6399",
        appended(*WORDY),
        client="anything-llm",
        told=["2:47 PM"],
    ),
    Trigger(36, "not recognised", appended(*WORDY), told=["2:47 PM"]),
    Trigger(36, "short answer", appended("Hello.", "Because.", "Now."), told=["2:47 PM"]),
    Trigger(
        36,
        "Mintplex-Labs/anything-llm#6398",
        [
            at_the_top(31, user("Hi.")),
            at_the_top(32, user("Hi."), assistant("Hello."), user("Why?")),
        ],
        client="anything-llm",
        told=["2:32:07 PM"],
    ),
]


@pytest.mark.parametrize("trigger", named(WITH_A_NOTE))
def test_the_last_message_is_not_lost(trigger: Trigger) -> None:
    """What was said of the time stays behind the message it was said with, and the new one knows
    the new time.
    """
    made = played(trigger)
    assert all(holds(trigger, made))
    assert not any(holds(trigger, played(trigger, "off")))
    for value in trigger.told:
        assert value in last(made[-1])


# A voice assistant: a stale prefix is fine, a stale answer is not.


def home(time: str, state: str = "off") -> Message:
    """Home Assistant's system prompt."""
    return system(
        f"Current time is {time}. Today's date is 2026-10-09.\n"
        "You are a voice assistant for Home Assistant.\nAnswer in one or two sentences.\n"
        "An overview of the areas and the devices in this smart home:\n"
        f"- names: Kitchen Light\n  domain: light\n  state: '{state}'\n"
        "- names: Alarm\n  domain: input_datetime\n  state: '07:30:00'\n"
    )


ON, TIME = user("turn on the kitchen light"), user("what time is it?")
VOICE = [
    pytest.param([], id="46 home-assistant/core#133687"),
    pytest.param([ON, assistant("Done.")], id="46 home-assistant/core#134847"),
]


@pytest.mark.parametrize("client", ["home-assistant", ""])
@pytest.mark.parametrize("history", VOICE)
def test_the_answer_knows_the_time(history: list[Message], client: str) -> None:
    """Each command finds the prompt of the first one, byte for byte, and the time it is asked at.

    With a history, and without one, where there is no conversation to remember.
    """
    desk = Desk(client=client)
    first = desk.ask(home("15:09:20"), ON)
    second = desk.ask(home("15:10:05"), *history, TIME)
    assert sent(second)[0] == sent(first)[0] == home("15:09:20")
    assert last(first) == ON["content"]
    assert last(second).startswith("what time is it?")
    assert "Current time is 15:10:05" in last(second)
    third = desk.ask(home("16:12:00"), *history, TIME)
    assert sent(third)[0] == home("15:09:20")
    assert "Current time is 16:12:00" in last(third)
    assert "15:10:05" not in last(third)


@pytest.mark.parametrize("client", ["home-assistant", ""])
@pytest.mark.parametrize(
    "history",
    [
        pytest.param([], id="47 home-assistant/core#122764"),
        pytest.param([ON, assistant("Done.")], id="47 in one conversation"),
    ],
)
def test_states_are_never_frozen(history: list[Message], client: str) -> None:
    """The opposite report: an hour later the model gets the states and the time of now."""
    desk = Desk(client=client)
    desk.ask(home("15:09:20"), ON)
    made = desk.ask(home("16:09:20", "on"), *history, user("is the light on?"))
    whole = made.raw.decode()
    assert "state: 'on'" in sent(made)[0]["content"]
    assert "state: 'off'" not in whole
    assert "16:09:20" in whole
    alarm = home("16:09:20")["content"].replace("07:30", "08:15")
    later = desk.ask(system(alarm), *history, user("when is the alarm?"))
    assert "state: '08:15:00'" in sent(later)[0]["content"]
    assert b"07:30" not in later.raw


def test_47_nothing_is_held_beyond_one_conversation() -> None:
    """Another key gets its own prompt, unchanged, whatever the first one was told."""
    desk = Desk(client="home-assistant")
    desk.ask(home("15:09:20"), ON)
    body = orjson.dumps({"messages": [home("15:10:05"), TIME]})
    assert desk.raw(body, key="other").raw == body


# What a front-end writes anew is content.


def remembered(*lines: str) -> Message:
    """Open WebUI's system prompt with memories."""
    listed = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
    return system(
        f"You are helpful.\n\n<memory_context>\n{listed}\n</memory_context>\n\nBe kind. " + "x" * 99
    )


ONE, TWO = remembered("Likes tea."), remembered("Likes tea.", "Has a cat.")
HISTORY = [user("Hi."), assistant("Hello."), user("I have a cat.")]
MEMORY = [
    Turn({"messages": [ONE, *HISTORY[:1]]}, HISTORY[1]),
    Turn({"messages": [TWO, *HISTORY]}, assistant("Nice.")),
    Turn({"messages": [TWO, *HISTORY, assistant("Nice."), user("Bye.")]}),
]
STORY = [
    user(f"Line {n} of the story is told at length.")
    if n % 2 == 0
    else assistant(f"Line {n} is answered at length.")
    for n in range(12)
]
CARD = system("Write Seraphina's next reply in a fictional chat between Seraphina and You.")
SUMMARY = system("[Summary: they met in a forest.]")
EXPLAINED = [
    Explained(
        Trigger(45, "open-webui/open-webui#30239", MEMORY[:2]),
        "system prompt changed at character 50: nothing → ",
        "The opt-in rule `memory` keeps the first one",
    ),
    Explained(
        Trigger(
            49,
            "SillyTavern/SillyTavern#1278",
            [Turn({"messages": [CARD, *STORY[:9]]}), Turn({"messages": [CARD, *STORY[2:11]]})],
            client="sillytavern",
        ),
        "history trimmed at the front: 2 messages are gone",
        "The client drops its oldest messages.",
    ),
    Explained(
        Trigger(
            49,
            "SillyTavern/SillyTavern#2519",
            [
                Turn({"messages": [CARD, *STORY[:9]]}),
                Turn({"messages": [CARD, *STORY[:5], SUMMARY, *STORY[5:11]]}),
            ],
            client="sillytavern",
        ),
        "a message was inserted at message 7",
        "The client edited its history.",
    ),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, id=f"{one.trigger.row} {one.trigger.report}") for one in EXPLAINED],
)
def test_left_alone_and_explained(case: Explained) -> None:
    """The client's own bytes go on, and the first difference is named."""
    made = played(case.trigger)
    assert [one.raw for one in made] == [orjson.dumps(turn.body) for turn in case.trigger.turns]
    found = why(made[-2], made[-1])
    assert found is not None
    assert quoted(found).startswith(case.sentence)
    assert case.advice in found.advice


def test_45_memory_by_request() -> None:
    """Who asks for it gets the first block frozen, and the newer one in a note that stays."""
    nice, ok = assistant("Nice."), assistant("Ok.")
    later = [*HISTORY, nice, user("Go on.")]
    turns = [
        Turn({"messages": [ONE, *HISTORY[:1]]}, HISTORY[1]),
        Turn({"messages": [ONE, *HISTORY]}, nice),
        Turn({"messages": [TWO, *later]}, ok),
        Turn({"messages": [TWO, *later, ok, user("Bye.")]}),
    ]
    trigger = Trigger(45, "", turns, rules=["+memory"])
    made = played(trigger)
    assert holds(trigger, made) == [True, True, True]
    assert holds(trigger, played(trigger, "off")) == [True, False, True]
    assert "Has a cat." in last(made[2])
    assert last(made[3]) == "Bye."


def test_45_anothers_memory_is_not_put_in() -> None:
    """Who only began alike keeps the own block: it may be another person."""
    made = played(Trigger(45, "", MEMORY, rules=["+memory"]))
    assert "Has a cat." in made[1].raw.decode()


# What the template does, and what sessions share.

THINK = "<think>\n\n</think>\n\n"
QWEN = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_63_qwenlm_qwen3_1826() -> None:
    """The same messages, an empty think block in the newest turn alone: said, with the way out."""
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    history = [system("S"), user("Hi"), assistant("Hello"), user("Go")]
    turns = [Turn({"messages": history[:n], **kwargs}) for n in (2, 4)]
    trigger = Trigger(63, "QwenLM/Qwen3#1826", turns)
    made = played(trigger)
    assert holds(trigger, made) == [True]
    assert [one.raw for one in made] == [orjson.dumps(turn.body) for turn in turns]
    assert why(made[0], made[1]) is None
    now = f"{QWEN}Hello<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n{THINK}"
    found = rendered_difference(f"{QWEN}{THINK}", now, Traits())
    assert found is not None
    assert found.cause is Cold.TEMPLATE
    assert found.sentence == "the template writes an empty think block only in the newest turn"
    assert "use a chat template that writes the empty block in every turn" in found.advice


CODE = "You are Qwen Code, an interactive CLI agent.\n" + "Rules of the house.\n" * 40


def started(date: str, tree: str) -> Message:
    """Qwen Code's first message."""
    return user(
        "<system-reminder>\nThis is the Qwen Code. We are setting up the context for our chat.\n"
        f"Today's date is {date}.\nMy operating system is: linux\nFolders:\n{tree}\n"
        "</system-reminder>"
    )


def test_65_anbeeld_beellama_105() -> None:
    """A new session has the head of the last one where the client sends the same bytes, and only
    there: what stands in its own messages is not taken from another conversation.
    """
    desk = Desk(client="qwen-code")
    monday = desk.ask(system(CODE), started("Monday, November 30, 2026", "a.py"), user("Hi"))
    tuesday = desk.ask(system(CODE), started("Tuesday, December 1, 2026", "b.py"), user("Hi"))
    assert sent(tuesday)[0] == sent(monday)[0]
    assert sent(tuesday)[1] == started("Tuesday, December 1, 2026", "b.py")
    dated = [f"{CODE}Today's date: {day}\n" for day in ("Sun Nov 29 2026", "Mon Nov 30 2026")]
    desk = Desk(client="opencode")
    heads = [sent(desk.ask(system(text), user(f"Task {text[-9:]}")))[0] for text in dated]
    assert heads[0] == heads[1] == system(dated[0])
