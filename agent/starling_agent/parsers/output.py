"""The parts of an output, as readers write them: without the white space around reasoning and calls."""

import re
from functools import cache

from starling_agent.parsers.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning, Steady
from starling_agent.parsers.json_text import STRING_PIECE, JsonScanner, escaped

_STEADY_ARGUMENTS = Steady(STRING_PIECE, Arguments)


class Output:
    """Collects events. A call is open from `begin_call` to `end_call`."""

    def __init__(self, trims_content: bool) -> None:
        self.events: list[Event] = []
        self.content = TrimmedText(self, Content, trims_content)
        self.reasoning = TrimmedText(self, Reasoning, trims=True)
        self.open_call: JsonScanner | None = None
        """The arguments of the call that is open."""
        self.calls = 0
        """Calls that have begun."""
        self.is_cut = False
        """The output ended before the model had ended it, so that a call that is open stays so."""

    def take(self) -> list[Event]:
        """Returns the events since the last `take`."""
        events, self.events = self.events, []
        return events

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begins a call; ends one that is open, whose format has no more of it."""
        self.end_call()
        self.content.mark()
        self.open_call = JsonScanner()
        self.calls += 1
        self.events.append(CallBegin(name, call_id))

    def arguments(self, text: str) -> int:
        """Adds a piece of the arguments' JSON. Returns how many characters belong to it."""
        assert self.open_call is not None, "arguments come after begin_call"
        taken, written = self.open_call.feed(text)
        if written:
            self.events.append(Arguments(written))
        return taken

    def steady_arguments(self) -> Steady | None:
        """Returns what becomes of text within a string of the arguments; None: the next text may be anything else."""
        return _STEADY_ARGUMENTS if self.open_call is not None and self.open_call.is_in_string else None

    def text_argument(self, text: str) -> None:
        """Adds a piece of a text within a string of the arguments."""
        self.arguments(escaped(text))

    @property
    def arguments_are_empty(self) -> bool:
        """True for an open call whose object has no argument yet."""
        return self.open_call is not None and self.open_call.is_empty_object

    def end_call(self) -> None:
        """Ends the open call, if there is one; completes arguments that are no whole JSON object."""
        if self.open_call is None or (self.is_cut and not self.open_call.is_done):
            return
        is_repaired = not self.open_call.is_done
        if is_repaired:
            self.events.append(Arguments(self.open_call.rest()))
        self.open_call = None
        self.events.append(CallEnd(is_repaired))


class TrimmedText:
    """Makes events of text, but of white space beside marks only where text is on both sides."""

    def __init__(self, output: Output, event: type[Content] | type[Reasoning], trims: bool) -> None:
        self._output = output
        self._event = event
        self._trims = trims
        self._space: list[str] = []
        self.has_begun = False
        """Text was passed on."""
        self._is_marked = False
        """A mark stands where the white space does."""

    def __call__(self, text: str) -> None:
        if not self._trims:
            self.has_begun |= bool(text)
            self._sink(text)
            return
        if self.has_begun and not self._space and text and not text[-1].isspace():  # nearly always
            self._is_marked = False
            self._sink(text)
            return
        stripped = text.rstrip()
        if not stripped:
            self._space.append(text)
            return
        shown = "".join((*self._space, stripped))
        if self._is_marked and not self.has_begun:
            shown = shown.lstrip()
        self.has_begun = True
        self._is_marked = False
        self._space = [text[len(stripped) :]] if len(stripped) < len(text) else []
        self._sink(shown)

    def _sink(self, text: str) -> None:
        self._output.events.append(self._event(text))

    def steady(self, firsts: str) -> Steady | None:
        """Returns what becomes of text without any of the characters, and without white space at its end."""
        is_steady = not self._trims or (self.has_begun and not self._space and not self._is_marked)
        if not is_steady:
            return None
        return _steady_text(self._event, firsts, self._trims)  # type: ignore[arg-type]  # classes can be hashed

    def forget_space(self) -> None:
        """Says that white space which was held back is written already."""
        self._space = []

    def mark(self) -> None:
        """Says that something else begins here, before which white space does not count."""
        self._is_marked = True

    def end(self) -> None:
        """Takes the end of the output."""
        if (space := "".join(self._space)) and not self._is_marked:
            self._sink(space)
        self._space = []


@cache
def _steady_text(event: type[Content] | type[Reasoning], firsts: str, trims: bool) -> Steady:
    """Returns one object for all outputs. If it `trims`, the last character of its text is no white space."""
    none = re.escape(firsts)
    character = f"[^{none}]" if firsts else "."
    last = f"[^{none}\\s]" if trims else character
    return Steady(re.compile(f"{character}*{last}", re.DOTALL), event)
