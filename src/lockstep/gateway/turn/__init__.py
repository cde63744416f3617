"""The pipeline of a turn, shared by every agent dialect.

A dialect (`chat/`, `messages/`, `responses/`) decodes its body, translates it to a ChatRequest, and
writes the replies in its own shapes. Everything between is here, in this order:

    open      open.py      ChatRequest -> GatewayTurn: model, renderer, session, worker request
    plan      prompt.py    ChatRequest -> PromptPlan: the prompt's ids, and the turn they follow
    sample    sample.py    GatewayTurn -> Completion: one worker's choices, whole or in parts
    commit    turn.py      Completion -> ChatReply: parsed, then stored before the client sees it

The other modules serve `open` and `plan`: `template_variables` makes renderers for the variables
that a request sets, `context_limit` rejects text that cannot fit before it is tokenized, `kept_ids`
builds prompts that start with ids of the client, `harness` reads which agent sent the request.
`token_turn` is for requests whose prompt is token ids: it only plans and commits.
"""
