"""LangChain's standard tests of a chat model, for its clients of three APIs.

`test_langchain.py` runs this file in the clients' environment; $JUDGED_URL is the server.
"""

import os

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["JUDGED_URL"]
COMMON = {"model": "Qwen/Qwen3-0.6B", "api_key": "none", "max_retries": 0}


class TestChatOpenAI(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params = COMMON | {"base_url": f"{URL}/v1", "stream_usage": True}
    supports_json_mode = True
    model_override_value = "other"


class TestResponses(TestChatOpenAI):
    chat_model_params = COMMON | {"base_url": f"{URL}/v1", "use_responses_api": True}


class TestChatAnthropic(ChatModelIntegrationTests):
    chat_model_class = ChatAnthropic
    chat_model_params = COMMON | {"base_url": URL, "max_tokens": 500}
    supports_anthropic_inputs = True
    model_override_value = "other"
