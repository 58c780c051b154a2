// llama.cpp's figures for bench/llama_cpp.py: node llama_cpp.mjs PACKAGE FILE THREADS BATCH PROMPT NEW TRIES
// prints a line of JSON: the seconds to load, and the fewest of TRIES batches of random prompts.
import path from "node:path";
import {pathToFileURL} from "node:url";

const [, , folder, file, threads, ...numbers] = process.argv;
const [batch, prompt, generated, tries] = numbers.map(Number);
const {getLlama} = await import(pathToFileURL(path.join(folder, "node_modules/node-llama-cpp/dist/index.js")));

let began = performance.now();
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: "error"});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({
  sequences: batch, contextSize: prompt + generated + 16, threads: Number(threads), batchSize: Math.max(512, batch),
});
const loaded = (performance.now() - began) / 1000;
const sequences = Array.from({length: batch}, () => context.getSequence());

async function answer(sequence) {
  const tokens = Array.from({length: prompt}, () => 100 + Math.floor(Math.random() * 2900));
  let count = 0;
  for await (const _ of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) if (++count >= generated) break;
}

let best = Infinity;
for (let i = 0; i < tries; ++i) {
  for (const sequence of sequences) await sequence.clearHistory();
  began = performance.now();
  await Promise.all(sequences.map(answer));
  best = Math.min(best, (performance.now() - began) / 1000);
}
console.log(JSON.stringify({loaded, best}));
process.exit(0);
