// The Vercel AI SDK with its default provider, the responses API: a tool loop, whole or streamed,
// and another question. Its history comes back as references to the items of the responses.
const { createOpenAI } = require("@ai-sdk/openai");
const { generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");

const [base, how] = process.argv.slice(2);
const calc = tool({
  description: "Evaluates an arithmetic expression.",
  inputSchema: z.object({ expression: z.string() }),
  execute: ({ expression }) => String(Function(`return ${expression}`)()),
});
let references = 0;
const counted = (url, init) => {
  references += JSON.parse(init.body).input.filter((item) => item.type === "item_reference").length;
  return fetch(url, init);
};
const request = {
  model: createOpenAI({ baseURL: base, apiKey: "dummy", fetch: counted })("tiny"),
  system: "You calculate.",
  tools: { calc },
  stopWhen: stepCountIs(5),
  maxRetries: 0,
};

async function ask(messages) {
  if (how === "whole") {
    const result = await generateText({ ...request, messages });
    return [result.text, result.responseMessages];
  }
  let failure;
  const result = streamText({ ...request, messages, onError: ({ error }) => (failure = error) });
  await result.consumeStream();
  if (failure) throw failure;
  return [await result.text, await result.responseMessages];
}

async function main() {
  const question = { role: "user", content: "What is 417 + 86, and then times 3?" };
  const [answer, replies] = await ask([question]);
  const [last] = await ask([question, ...replies, { role: "user", content: "Thank you." }]);
  console.log(JSON.stringify({ answer, last, references }));
}

main();
