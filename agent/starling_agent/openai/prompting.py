"""Makes token ids of requests' prompts. An endpoint does so, and a router that looks for them in caches."""

from collections.abc import Callable

from starling_engine.frontend.render_process import ChatRendering
from starling_engine.frontend.tokenizer import Tokenizer

from starling_agent.http.errors import ApiError
from starling_agent.openai.output_format import OutputFormat
from starling_agent.openai.prompts import PromptReader
from starling_agent.settings import ServerSettings


class Prompting:
    """The tokenizer, the templates and the limits of one model, under the names in `settings`, of which there is at least one.

    `max_waiting` is how many chats may wait to be rendered.
    """

    def __init__(
        self, tokenizer: Tokenizer, settings: ServerSettings, vocab_size: int, max_model_len: int, max_waiting: Callable[[], int]
    ) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.names = settings.served_model_names
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.prompts = PromptReader(tokenizer, vocab_size, max_model_len, settings.max_prompts)
        self.rendering = ChatRendering(tokenizer.renderer, max_waiting=max_waiting)
        self.output_format = OutputFormat(
            tokenizer, settings.tool_call_parser, settings.reasoning_parser, whole_calls=settings.whole_tool_calls
        )

    def open(self) -> None:
        """Starts what requests need. Called before the first one."""
        self.rendering.open()

    def close(self) -> None:
        """Stops it. Called after the last request."""
        self.rendering.close()

    @property
    def possible_models(self) -> str:
        """The end of errors about `model`: what it can be."""
        return f"this server has {', '.join(self.names)}"

    def model_name(self, given: str | None) -> str:
        """Returns the name for the answer, which routes of vLLM's let requests leave out.

        Raises ApiError 404 for a model that is not served.
        """
        if given is None:
            return self.names[0]
        if given not in self.names:
            message = f"the model {given[:200]!r} does not exist; {self.possible_models}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return given
