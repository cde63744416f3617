"""A program of one dialect: asks through that dialect's own SDK, once or more, and goes on."""

import sys

dialect, endpoint, key, prompt, turns = sys.argv[1:6]
stream = "--stream" in sys.argv
root = endpoint.rstrip("/").removesuffix("/v1")
history = [{"role": "user", "content": prompt}]


def messages():
    from anthropic import Anthropic

    client = Anthropic(base_url=root, api_key=key, max_retries=0)
    options = {"model": "any", "max_tokens": 24, "messages": history}
    if stream:
        with client.messages.stream(**options) as events:
            events.until_done()
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**options)
    return {"role": "assistant", "content": [block.model_dump() for block in answer.content]}


def responses():
    from openai import OpenAI

    client = OpenAI(base_url=f"{root}/v1", api_key=key, max_retries=0)
    if stream:
        with client.responses.stream(model="any", input=history) as events:
            events.until_done()
            answer = events.get_final_response()
    else:
        answer = client.responses.create(model="any", input=history, max_output_tokens=24)
    return {"role": "assistant", "content": answer.output_text}


def chat():
    from openai import OpenAI

    client = OpenAI(base_url=f"{root}/v1", api_key=key, max_retries=0)
    answer = client.chat.completions.create(model="any", messages=history, max_tokens=24)
    return {"role": "assistant", "content": answer.choices[0].message.content}


for at in range(int(turns)):
    history.append({"messages": messages, "responses": responses, "chat": chat}[dialect]())
    if at + 1 < int(turns):
        history.append({"role": "user", "content": "Reverse: 123"})
