// One queue of the status page: its numbers, its charts, its workers.

import { Chart } from "./chart.js";
import { copyOf, count, seconds } from "./parts.js";
import { showWorker } from "./worker.js";

const LANES = ["high", "normal", "low"];

/** Add a queue to `parent`; `show` brings it up to date, `ask` fetches data. */
export function showQueue(parent, ask) {
  const { root, part } = copyOf("queue");
  parent.append(root);
  const depth = new Chart(part("depth"), { label: part("depth-at"), since: part("depth-since") }, {
    series: LANES.toReversed(),
    isStacked: true,
    say: (now) => `${count(now.high + now.normal + now.low)} wait`,
  });
  const tokens = new Chart(part("tokens"), { label: part("tokens-at"), since: part("tokens-since") }, {
    series: ["prompt", "generated"],
    isStacked: false,
    say: ({ generated, prompt }) => `${count(generated)} generated, ${count(prompt)} of prompts`,
  });
  const workers = new Map();

  function showWorkers({ queue, workers: found, is_reached }) {
    const named = new Map(found.map((worker) => [`${worker.partition} ${worker.name}`, worker]));
    for (const [name, card] of workers) {
      if (named.has(name)) continue;
      card.remove();
      workers.delete(name);
    }
    [...named].forEach(([name, worker], i) => {
      if (!workers.has(name)) workers.set(name, showWorker(part("workers"), i, queue, worker, ask));
      workers.get(name).show(worker, is_reached);
    });
    part("no-worker").hidden = found.length > 0;
  }

  return {
    remove: () => {
      for (const card of workers.values()) card.remove();
      root.remove();
    },
    show: (queue, intervalS) => {
      part("queue").textContent = queue.queue;
      part("unreached").hidden = queue.is_reached;
      part("tiles").classList.toggle("old", !queue.is_reached);
      if (queue.now) showNumbers(part, queue.now, queue.workers);
      depth.show(queue.history, intervalS);
      tokens.show(queue.history, intervalS);
      showWorkers(queue);
    },
  };
}

function showNumbers(part, now, workers) {
  const put = (name, text) => (part(name).textContent = text);
  const lanes = LANES.map((name) => [name, now.lanes[name]]);
  put("waiting", count(lanes.reduce((sum, [, lane]) => sum + lane.waiting, 0)));
  put("lanes", lanes.map(([name, lane]) => `${name} ${count(lane.waiting)}`).join(" · "));
  put("running", count(now.running));
  put("delayed", now.delayed ? `${count(now.delayed)} to start later` : "");
  const oldest = lanes.find(([, lane]) => lane.oldest_s !== null && lane.oldest_s === now.oldest_s);
  put("oldest", now.oldest_s === null ? "–" : seconds(now.oldest_s));
  put("oldest-lane", oldest ? `in ${oldest[0]}` : "");
  const sum = (name) => workers.reduce((all, worker) => all + worker[name], 0);
  put("rate", count(sum("generated_rate")));
  put("prompt-rate", `${count(sum("prompt_rate"))} of prompts`);
  put("outstanding", count(now.prompt_tokens_outstanding + now.budget_tokens_outstanding));
  put("outstanding-more", `${count(now.budget_tokens_outstanding)} to generate`);
  put("dead", count(now.dead_letters));
  put("dead-more", now.left_behind ? `${count(now.left_behind)} jobs left behind` : "");
  part("dead-tile").classList.toggle("alarm", now.dead_letters > 0);
}
