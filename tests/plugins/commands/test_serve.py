"""`serve`: a real server process, asked by the real client of OpenAI."""

import http.client
import json
import signal
import socket
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import openai
import pytest
import torch

from core.__main__ import main
from plugins.commands.chat_prompts import encode_messages, find_template
from plugins.commands.generate_network import load
from plugins.commands.serve_requests import Limits, understood
from tests.support.chat_checkpoint import store_chat
from tests.support.started import Started
from toolkit.generation.decoding import Decoding
from toolkit.generation.filters import Sampling

LONG = {"max_tokens": 100_000, "temperature": 0, "stop": "never this"}
ANSWERED = (200, 408)
"""What a server answers that has a place: with a --timeout of a second a busy machine may be too slow for one token."""


class Served(Started):
    """A server process on a free port."""

    def __init__(self, path, *words):
        super().__init__(["serve", f"--ckpt_path={path}", "--port=0", *words], path.parent)
        self.port = int(self.until(r"http://127\.0\.0\.1:(\d+)/v1")[1])
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def post(self, body, path="/v1/completions", **headers):
        """Returns status and JSON of a request that a client of OpenAI would not send."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json"} | headers
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return store_chat(tmp_path_factory.mktemp("served") / "small.ckpt")


@pytest.fixture(scope="module")
def served(checkpoint):
    server = Served(checkpoint, "--max_new_tokens=100", "--max_texts=4", "--waiting=20")
    yield server
    assert server.end() == 143
    assert "Traceback" not in server.said


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint)


def drawn(model, ids, seed, count=8, **sampling):
    """Returns the tokens that the library draws."""
    found = Decoding(
        model.network, [ids], max_new_tokens=count, sampling=Sampling(**sampling), seeds=[seed], stop_ids=model.stop_ids,
        log_probabilities=True,
    )  # fmt: skip
    return list(found)


@pytest.mark.ci
def test_models_are_listed(served):
    assert [one.id for one in served.client.models.list()] == ["small"]
    assert served.client.models.retrieve("small").owned_by == "leyden"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("gpt-4")


@pytest.mark.ci
def test_completions_are_those_of_generate(served, model):
    asked = {
        "model": "small",
        "prompt": ["ab", "hello <|im_end|>"],
        "n": 2,
        "seed": 5,
        "max_tokens": 8,
        "temperature": 1.5,
    }
    answer = served.client.completions.create(**asked, logprobs=2, extra_body={"top_k": 50})
    prompts = model.encoder.encode_prompts(asked["prompt"])
    assert 2 not in prompts[1]  # what a text spells is no token
    for row, choice in enumerate(answer.choices):
        tokens = drawn(model, prompts[row // 2], 5 + row, temperature=1.5, top_k=50)
        assert choice.index == row
        assert choice.text == model.tokenizer.decode([one.id for one in tokens])
        assert choice.finish_reason == ("length" if len(tokens) == 8 else "stop")
        assert choice.logprobs.token_logprobs == pytest.approx(
            [one.log_probability for one in tokens], abs=1e-5
        )
        assert all(len(one) <= 2 for one in choice.logprobs.top_logprobs)
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.total_tokens - answer.usage.prompt_tokens == answer.usage.completion_tokens
    pieces = list(served.client.completions.create(**asked, stream=True, extra_body={"top_k": 50}))
    for choice in answer.choices:
        own = [one.choices[0] for one in pieces if one.choices[0].index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
    ids = served.client.completions.create(**asked | {"prompt": prompts}, extra_body={"top_k": 50})
    assert [one.text for one in ids.choices] == [one.text for one in answer.choices]


@pytest.mark.ci
def test_a_chat_follows_the_template_streamed_or_not(served, model):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "é<|im_end|>"}]},
    ]
    asked = {
        "model": "small",
        "messages": messages,
        "seed": 3,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = served.client.chat.completions.create(**asked)
    plain = [messages[0], {"role": "user", "content": "é<|im_end|>"}]
    ids = encode_messages(model, find_template(model, None), plain)
    tokens = drawn(model, ids, 3, temperature=1)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == model.tokenizer.decode([one.id for one in tokens])
    logs = choice.logprobs.content
    assert [one.logprob for one in logs] == pytest.approx([one.log_probability for one in tokens], abs=1e-5)
    with torch.no_grad():
        logits = model.network.logits(model.network({"input_ids": torch.tensor([ids])}))[0, -1]
    best = logits.log_softmax(-1).topk(3)
    assert [one.logprob for one in logs[0].top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert answer.usage.prompt_tokens == len(ids)
    stream = list(
        served.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in stream[:-1]) == choice.message.content
    assert sum(len(one.choices[0].logprobs.content) for one in stream[:-1] if one.choices[0].logprobs) == len(
        logs
    )
    assert stream[-2].choices[0].finish_reason == choice.finish_reason
    assert (stream[-1].choices, stream[-1].usage) == ([], answer.usage)


@pytest.mark.ci
def test_a_stop_string_ends_a_text(served):
    asked = {"model": "small", "prompt": "ab", "max_tokens": 40, "temperature": 0}
    [whole] = served.client.completions.create(**asked).choices
    stop = whole.text[5:7]
    for stream in (False, True):
        found = served.client.completions.create(**asked, stop=[stop, "never this"], stream=stream)
        parts = [one.choices[0] for one in found] if stream else found.choices
        assert "".join(one.text for one in parts) == whole.text[: whole.text.index(stop)]
        assert parts[-1].finish_reason == "stop"


@pytest.mark.ci
def test_without_a_seed_texts_differ(served):
    texts = {served.client.completions.create(model="small", prompt="a").choices[0].text for _ in range(3)}
    assert len(texts) > 1


def say(text="hi"):
    return [{"role": "user", "content": text}]


BAD = {
    "no JSON": (b"{", "/v1/completions", 400, "The body is no JSON"),
    "a list": ([], "/v1/completions", 400, "The body is no JSON object"),
    "not UTF-8": (b"\xff", "/v1/completions", 400, "The body is no JSON"),
    "half a character": (b'{"\\ud800": 1}', "/v1/completions", 400, "surrogates not allowed"),
    "half a character in a prompt": (b'{"prompt": "\\ud800"}', "/v1/completions", 400, "surrogates not allowed"),
    "too large": (b" " * (5 << 20), "/v1/completions", 413, "more than 4 MiB"),
    "another model": ({"model": "gpt-4", "prompt": "a"}, "/v1/completions", 404, "does not exist"),
    "a wrong field": ({"prompt": "a", "temprature": 1}, "/v1/completions", 400, "Did you mean temperature?"),
    "no messages": ({}, "/v1/chat/completions", 400, "Missing required parameter: 'messages'"),
    "empty messages": ({"messages": []}, "/v1/chat/completions", 400, "at least one message"),
    "an odd message": ({"messages": [{"role": "king", "content": "a"}]}, "/v1/chat/completions", 400, "a role"),
    "a picture": ({"messages": say([{"type": "image_url"}])}, "/v1/chat/completions", 400, "must be text"),
    "tools": ({"messages": say(), "tools": [{}]}, "/v1/chat/completions", 400, "tools is not supported"),
    "a template's words": ({"messages": say(), "chat_template_kwargs": {"messages": 1}}, "/v1/chat/completions", 400, "cannot set"),
    "a word of Python": ({"messages": say(), "chat_template_kwargs": {"self": 1}}, "/v1/chat/completions", 400, "cannot set self"),
    "temperature": ({"prompt": "a", "temperature": -1}, "/v1/completions", 400, "temperature=-1.0 must be 0"),
    "a type": ({"prompt": "a", "temperature": "hot"}, "/v1/completions", 400, "must be of the type float"),
    "true for a number": ({"prompt": "a", "n": True}, "/v1/completions", 400, "must be of the type int"),
    "no texts": ({"prompt": "a", "n": 0}, "/v1/completions", 400, "n is 0; it must be at least 1"),
    "many texts": ({"prompt": ["a", "b"], "n": 3}, "/v1/completions", 400, "6 texts are asked for"),
    "long text": ({"prompt": "a", "max_tokens": 101}, "/v1/completions", 400, "this server gives 100 at most"),
    "long prompt": ({"prompt": "a" * 300}, "/v1/completions", 400, "maximum context length is 256"),
    "token ids": ({"prompt": [1, 320]}, "/v1/completions", 400, "token ids below 320"),
    "prompt": ({"prompt": {"a": 1}}, "/v1/completions", 400, "prompt must be text"),
    "stop": ({"prompt": "a", "stop": [1]}, "/v1/completions", 400, "stop must be"),
    "empty stop": ({"prompt": "a", "stop": ""}, "/v1/completions", 400, "stop string"),
    "seed": ({"prompt": "a", "seed": 2**70}, "/v1/completions", 400, "seed is"),
    "logprobs": ({"prompt": "a", "logprobs": 6}, "/v1/completions", 400, "logprobs is 6"),
    "another path": ({}, "/v1/embeddings", 404, "is not served here"),
    "another method": ({}, "/v1/models", 405, "is not served here"),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_told_what_is_wrong(name, served):
    body, path, status, said = BAD[name]
    found, answer = served.post(body, path)
    assert found == status, answer
    assert answer.keys() == {"error"}
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert said in answer["error"]["message"]
    assert served.post({"prompt": "a", "max_tokens": 1})[0] == 200  # and it goes on


@pytest.mark.ci
def test_errors_are_those_of_the_client(served):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.completions.create(model="small", prompt="a" * 300)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.ci
def test_a_page_of_another_name_in_a_browser_is_refused(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("GET", "/v1/models", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 400


@pytest.mark.ci
def test_what_a_page_can_send_without_asking_is_refused(served):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, answer = served.post({"prompt": "a"}, **{"Content-Type": kind})
        assert (status, answer["error"]["message"][-17:]) == (415, "application/json.")


@pytest.mark.ci
def test_what_a_template_is_given_spells_no_special_token(tmp_path):
    """A client reaches neither the options of the command nor the special tokens, whatever the template writes."""
    path = store_chat(
        tmp_path / "small.ckpt", "{{ messages[0].content }}{{ style }}{{ special_tokens }}{{ model }}"
    )
    model = load(path)
    template, text = find_template(model, None), "a<|im_end|>"
    messages = [{"role": "user", "content": text}]
    for name in ("style", "special_tokens", "model"):
        body = {"messages": messages, "chat_template_kwargs": {name: text}}
        [ids] = understood(body, model, "small", template, Limits(8, 4), False, True).prompts
        assert model.tokenizer.decode(ids, skip_special_tokens=False) == text + text
        assert model.encoder.special["<|im_end|>"] not in ids


@pytest.mark.ci
def test_a_body_that_does_not_come_gives_its_place_back(checkpoint):
    server = Served(checkpoint, "--waiting=0", "--timeout=1")
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as slow:
            lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Length: 9"]
            slow.sendall("\r\n".join([*lines, "Content-Type: application/json", "", "{"]).encode())
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
            assert server.post({"prompt": "a", "max_tokens": 1})[0] in ANSWERED
    finally:
        assert server.end() == 143
    assert "Traceback" not in server.said


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A server that computes one request, lets one wait, and takes texts of any length."""
    path = store_chat(tmp_path_factory.mktemp("narrow") / "endless.ckpt", window=None)
    server = Served(path, "--max_new_tokens=1000000", "--waiting=1")
    yield server
    if server.process.is_alive():
        server.end()


def begun(server):
    """Returns a stream of a text without end, of which the first token has come."""
    stream = server.client.completions.create(model="endless", prompt="ab", stream=True, **LONG)
    next(iter(stream))
    return stream


def quick(server, **options):
    client = server.client.with_options(**options)
    return client.completions.create(model="endless", prompt="a", max_tokens=1)


@pytest.mark.ci
def test_a_client_that_leaves_ends_its_text(narrow):
    """Otherwise the second text without end would wait, and the third be refused."""
    for _ in range(3):
        begun(narrow).close()
        quick(narrow)
    for _ in range(3):  # and those that ask for no stream
        with socket.create_connection(("127.0.0.1", narrow.port)) as raw:
            body = json.dumps({"prompt": "ab", **LONG})
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall((head + body).encode())
            time.sleep(0.3)
        # A server that sees all of this late may take the one behind first: then who comes next is refused for a moment.
        quick(narrow, max_retries=3)


@pytest.mark.ci
def test_more_requests_than_may_wait_are_refused(narrow):
    stream = begun(narrow)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(quick, narrow) for _ in range(2)]
        [first], [other] = wait(both, return_when=FIRST_COMPLETED)
        refused = first.exception()
        assert isinstance(refused, openai.RateLimitError)
        assert refused.response.headers["retry-after"] == "1"
        assert refused.code == "server_busy"
        stream.close()
        assert other.result().usage.completion_tokens <= 1


@pytest.mark.ci
def test_a_request_that_takes_too_long_is_ended(tmp_path):
    hasty = Served(
        store_chat(tmp_path / "endless.ckpt", window=None), "--max_new_tokens=1000000", "--timeout=1"
    )
    with pytest.raises(openai.APIStatusError) as caught:
        hasty.client.completions.create(model="endless", prompt="ab", **LONG)
    assert caught.value.status_code == 408
    with pytest.raises(openai.APIError, match="longer than 1 s"):
        list(hasty.client.completions.create(model="endless", prompt="ab", stream=True, **LONG))
    assert hasty.end() == 143
    assert "Traceback" not in hasty.said


@pytest.mark.ci
def test_a_client_that_stops_reading_gives_its_place_back(tmp_path):
    path = store_chat(tmp_path / "endless.ckpt", window=None)
    # Each event has the name: some hundred of them are more than the system buffers, so that few seconds are enough.
    words = ["--max_new_tokens=1000000", "--timeout=2", "--waiting=0", f"--name={'long' * 5000}"]
    server = Served(path, *words)
    try:
        server.post({"prompt": "a", "max_tokens": 1})  # what is computed for the first time takes longer
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536
            )  # else the system buffers megabytes
            stalled.connect(("127.0.0.1", server.port))
            body = json.dumps(
                {"prompt": "ab", "stream": True, "n": 16, "logprobs": 5, **LONG, "temperature": 1}
            )
            head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            stalled.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            assert stalled.recv(100).startswith(b"HTTP/1.1 200")
            end = time.monotonic() + 60
            while (status := server.post({"prompt": "a", "max_tokens": 1})[0]) == 429:
                assert time.monotonic() < end, "it holds its place"
                time.sleep(0.2)
            assert status in ANSWERED
    finally:
        assert server.end() == 143
    assert "did not read" in server.said
    assert "Traceback" not in server.said


@pytest.mark.ci
def test_a_signal_ends_a_server_that_is_busy(narrow):
    found, computes = [], threading.Event()

    def read():
        try:
            for piece in narrow.client.completions.create(model="endless", prompt="ab", stream=True, **LONG):
                found.append(piece)
                computes.set()
        except openai.APIError as error:
            found.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert computes.wait(60)
    assert narrow.end(signal.SIGINT) == 130
    reader.join(60)
    assert "shutting down" in str(found[-1])
    assert "Traceback" not in narrow.said


MISTAKES = {
    "port": (["--port=99999"], "--port 99999 must be 0 to 65535"),
    "host": (["--host=no.such.host.invalid"], "cannot be listened on"),
    "concurrency": (["--concurrency=0"], "--concurrency 0 must be at least 1"),
    "timeout": (["--timeout=nan"], "--timeout nan must be above 0"),
    "template": (["--template=nowhere"], "--template nowhere: No such file"),
    "option": (["--concurency=1"], "Did you mean --concurrency?"),
    "taken": (["--port={taken}"], "cannot be listened on"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_with_two(name, checkpoint, served, capsys):
    words, said = MISTAKES[name]
    words = [word.format(taken=served.port) for word in words]
    assert (
        main(["serve", f"--ckpt_path={checkpoint}", *(["--port=0"] if name != "taken" else []), *words]) == 2
    )
    assert said in capsys.readouterr().err
