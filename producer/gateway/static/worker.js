// One worker of the status page: what it is, how full it is, and its blocks while it is in view.

import { BlockMap } from "./blocks.js";
import { copyOf, count, seconds } from "./parts.js";

// Between two looks, and before the first snapshot.
const EVERY_MS = 1_000;
const SOON_MS = 300;
const DEAD = new Set(["late", "gone"]);

/** Add a worker's card to `parent` as its child number `place`; `ask` fetches data. */
export function showWorker(parent, place, queue, { name, partition }, ask) {
  const { root, part } = copyOf("worker");
  parent.insertBefore(root, parent.children[place] ?? null);
  const map = new BlockMap(part("canvas"), part("tip"));
  const address = new URLSearchParams({ queue, worker: name, partition });
  let isInView = false;
  let isDead = false;
  let isOld = false;
  let timer = null;
  const fade = () => root.classList.toggle("stale", isDead || isOld);
  // looks at once when it comes into view
  const seen = new IntersectionObserver(([entry]) => {
    isInView = entry.isIntersecting;
    if (isInView && timer !== null) look();
  });

  async function look() {
    clearTimeout(timer);
    timer = null;
    if (isInView && document.visibilityState === "visible") {
      const { snapshot } = await ask(`status/blocks?${address}`).catch(() => ({ snapshot: null }));
      if (snapshot) showBlocks(part, map, name, snapshot);
      else if (map.cells === null) part("legend").textContent = "The blocks show with its next report …";
      isOld = !snapshot;
      fade();
    }
    if (root.isConnected) timer = setTimeout(look, map.cells === null ? SOON_MS : EVERY_MS);
  }
  look();
  seen.observe(root);

  return {
    remove: () => {
      clearTimeout(timer);
      seen.disconnect();
      root.remove();
    },
    show: (worker, isReached) => {
      isDead = DEAD.has(worker.state) || !isReached;
      fade();
      part("name").textContent = worker.name;
      part("state").textContent = worker.state;
      part("state").className = `state ${worker.state}`;
      part("facts").textContent = facts(worker).join(" · ");
      part("load").textContent = load(worker).join(" · ");
    },
  };
}

function facts(worker) {
  const adapters = worker.adapters.length > 0 ? [`adapters ${worker.adapters.join(", ")}`] : [];
  return [
    worker.model,
    ...adapters,
    `version ${worker.version}`,
    `partition ${worker.partition}`,
    `context ${count(worker.max_model_len)} tokens`,
    `reported ${seconds(worker.age_s)} ago`,
  ];
}

function load(worker) {
  const used = worker.blocks - worker.free_blocks;
  const share = worker.blocks > 0 ? ` (${Math.round((100 * used) / worker.blocks)} %)` : "";
  const swapped = worker.swap_blocks ? [`${count(worker.used_swap_blocks)} of ${count(worker.swap_blocks)} swap blocks`] : [];
  return [
    `${count(worker.running)} running, ${count(worker.waiting)} waiting, ${count(worker.swapped)} swapped`,
    `${count(used)} of ${count(worker.blocks)} blocks of ${worker.block_size} tokens in use${share}`,
    ...swapped,
    `${count(worker.generated_rate)} tokens/s`,
  ];
}

function showBlocks(part, map, name, snapshot) {
  map.show(snapshot);
  const counted = snapshot.states
    .filter((state) => state !== "swapped" || snapshot.host_blocks > 0)
    .map((state) => [state, snapshot.counts[state]]);
  const words = counted.map(([state, number]) => `${count(number)} ${state}`);
  part("canvas").setAttribute("aria-label", `Blocks of ${name}: ${words.join(", ")}. Arrow keys go from block to block.`);
  part("legend").replaceChildren(
    ...counted.flatMap(([state], i) => {
      const swatch = document.createElement("i");
      swatch.className = state;
      return [swatch, `${words[i]} `];
    }),
  );
}
