// Keeps the rendered page up to date. Progress of a running sync is written in place; everything else is asked for
// again as a whole, at most once a second, and only the parts that differ are exchanged. Texts are set as text, never
// as markup. Without this script the page is complete, and reloads itself.
"use strict";
(() => {
  const REFRESH_MIN_MS = 1000;
  const WAITING_REFRESH_MS = 5000; // while somebody waits for somebody
  const IDLE_REFRESH_MS = 30000; // ages of lags, and what makes no event
  const RECONNECT_MS = [1000, 2000, 4000, 8000, 15000];

  const root = document.documentElement;
  const main = document.querySelector("main");
  const connection = document.getElementById("connection");
  const base = root.dataset.base;
  const quietS = Number(root.dataset.quietS);
  const token = new URLSearchParams(location.search).get("token");

  // -- words: the same as in words.py and protocol/amounts.py

  function duration(seconds) {
    seconds = Math.max(0, seconds);
    if (seconds < 0.001) return `${(seconds * 1000).toFixed(1)} ms`;
    if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    for (const [limit, size, unit] of [[120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"]]) {
      if (seconds < limit) return `${Math.floor(seconds / size)} ${unit}`;
    }
    return `${Math.floor(seconds / 86400)} d`;
  }

  function age(seconds) {
    if (seconds < 1) return "just now";
    return seconds < 10 ? `${Math.floor(seconds)} s ago` : `${duration(seconds)} ago`;
  }

  function bytes(count) {
    for (const unit of ["B", "kB", "MB"]) {
      if (count < 1000) return unit === "B" ? `${count} B` : `${count.toFixed(1)} ${unit}`;
      count /= 1000;
    }
    return `${count.toFixed(2)} GB`;
  }

  const percent = (fraction) => `${Math.floor(100 * fraction)} %`;

  // -- the clock: ages are counted on the service's, which may differ from this machine's

  let ahead = 0;

  function setClock() {
    ahead = Date.parse(main.dataset.now) - Date.now();
  }

  function tick() {
    for (const time of main.querySelectorAll("time[data-age]")) {
      say(time, age((Date.now() + ahead - Date.parse(time.dateTime)) / 1000));
    }
  }

  function say(element, text) {
    if (element !== null && element.textContent !== text) element.textContent = text;
  }

  // -- the connection

  let source = null;
  let failures = 0;

  function setConnection(state) {
    connection.dataset.connection = state;
    const [day, time] = main.dataset.now.split("T");
    const shown = state === "reconnecting" && !isDown() ? `; this is as of ${day.slice(5)} ${time.slice(0, 8)} UTC` : "";
    say(connection, state + shown);
  }

  const isDown = () => document.getElementById("headline").dataset.state === "down";

  function connect() {
    source = new EventSource(`${base}/v1/events${query()}`);
    source.addEventListener("open", () => {
      failures = 0;
      online();
      refresh(); // what happened before the connection stood
    });
    source.addEventListener("error", () => {
      setConnection("reconnecting");
      refresh(); // the registry may be down
      // A browser tries again by itself, but not where the answer was a refusal.
      if (source.readyState !== EventSource.CLOSED) return;
      setTimeout(connect, RECONNECT_MS[Math.min(failures, RECONNECT_MS.length - 1)]);
      failures += 1;
    });
    source.addEventListener("event", () => refresh());
    source.addEventListener("progress", (message) => progress(JSON.parse(message.data)));
  }

  // An ingress whose registry is gone may still open a stream, and end it at once.
  function online() {
    setConnection(source.readyState === EventSource.OPEN && !isDown() ? "live" : "reconnecting");
  }

  function query() {
    return token === null ? "" : `?token=${encodeURIComponent(token)}`;
  }

  // -- the page as a whole

  let due = null;
  let loading = false;
  let again = false;
  let loadedAt = Date.now();

  function refresh() {
    if (loading) {
      again = true;
    } else if (due === null) {
      due = setTimeout(load, Math.max(0, loadedAt + REFRESH_MIN_MS - Date.now()));
    }
  }

  async function load() {
    due = null;
    loading = true;
    again = false;
    try {
      const answer = await fetch(location.pathname + location.search, {
        cache: "no-store",
        headers: { Accept: "text/html" },
        signal: AbortSignal.timeout(10000),
      });
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      // A registry that does not answer is a page too; an error of a proxy in between is none.
      if (fresh.documentElement.dataset.base === base) {
        adopt(fresh);
        online();
      }
    } catch {
      setConnection("reconnecting");
    }
    loading = false;
    loadedAt = Date.now();
    if (again) refresh();
  }

  function adopt(fresh) {
    const focused = document.activeElement === null ? "" : document.activeElement.id;
    const open = new Set([...main.querySelectorAll("details[open]")].map((details) => details.id));
    for (const details of fresh.querySelectorAll("details")) details.open = open.has(details.id);
    const freshMain = fresh.querySelector("main");
    main.dataset.now = freshMain.dataset.now;
    exchange([...freshMain.children]);
    document.title = fresh.title;
    document.querySelector("link[rel=icon]").href = fresh.querySelector("link[rel=icon]").href;
    ready();
    if (focused !== "" && document.activeElement.id !== focused) {
      document.getElementById(focused)?.focus({ preventScroll: true });
    }
  }

  // Elements stay where they are and only change inside: a live region that is replaced is not read out loud.
  function exchange(wanted) {
    const here = new Map([...main.children].map((part) => [part.id, part]));
    for (const part of wanted) here.has(part.id) || here.set(part.id, part);
    const names = new Set(wanted.map((part) => part.id));
    for (const part of [...main.children]) names.has(part.id) || part.remove();
    let place = main.firstElementChild;
    for (const part of wanted) {
      const kept = here.get(part.id);
      if (kept === place) place = place.nextElementSibling;
      else main.insertBefore(kept, place);
      if (kept === part || kept.isEqualNode(part)) continue;
      for (const { name, value } of part.attributes) kept.setAttribute(name, value);
      kept.replaceChildren(...part.childNodes);
    }
  }

  let rows = new Map();

  function ready() {
    setClock();
    tick();
    rows = new Map();
    for (const row of main.querySelectorAll("[data-worker]")) {
      const name = row.dataset.worker;
      if (!rows.has(name)) rows.set(name, []);
      rows.get(name).push(row);
    }
    if (token === null) return;
    for (const link of main.querySelectorAll("a[data-api]")) {
      const url = new URL(link.href);
      url.searchParams.set("token", token);
      link.href = url.href;
    }
  }

  // -- a running sync, in place

  function progress({ epoch, consumers }) {
    const sync = document.getElementById("sync");
    if (epoch === null || sync === null || sync.dataset.epoch !== String(epoch.epoch)) {
      refresh();
      return;
    }
    document.getElementById("sync-progress").value = epoch.progress;
    say(document.getElementById("sync-percent"), percent(epoch.progress));
    say(document.getElementById("sync-seconds"), duration(epoch.seconds));
    const waitedFor = new Set(epoch.waiting_for);
    for (const consumer of consumers) {
      for (const row of rows.get(consumer.worker) ?? []) show(row, consumer, waitedFor);
    }
    const stalled = document.getElementById("headline").dataset.state === "stalled";
    if (stalled !== epoch.quiet_seconds >= quietS) refresh();
    else if (stalled) say(document.getElementById("detail"), `nothing has moved for ${duration(epoch.quiet_seconds)}`);
  }

  function show(row, consumer, waitedFor) {
    const { bytes_done: done, bytes_total: total } = consumer;
    const waiting = waitedFor.has(`worker ${consumer.worker}`);
    const standing = consumer.torn ? "torn" : consumer.ready ? "ready" : "not ready";
    const texts = {
      percent: percent(total ? Math.min(1, done / total) : 1),
      bytes: total ? `${bytes(done)} of ${bytes(total)}` : "nothing to pull",
      waits: !waiting
        ? "done"
        : consumer.state === "pulling"
          ? `waiting for ${consumer.waits_for || "its first reads"}`
          : "has not begun",
      version: consumer.version === null ? "none" : String(consumer.version),
      staged: consumer.staged_version === null ? "" : `(${consumer.staged_version} staged)`,
      state: consumer.state,
      standing,
    };
    for (const part of row.querySelectorAll("[data-show]")) {
      const what = part.dataset.show;
      if (what === "bar") {
        part.max = total || 1;
        part.value = total ? done : 1;
        continue;
      }
      say(part, texts[what]);
      if (what === "standing") mark(part, { torn: "bad", ready: "good" }[standing] ?? "warn");
      if (what === "state") mark(part, consumer.state === "failed" ? "bad" : "plain");
    }
  }

  function mark(element, kind) {
    const name = `mark ${kind}`;
    if (element.className !== name) element.className = name;
  }

  function keepFresh() {
    const waiting = document.getElementById("why") !== null;
    if (Date.now() - loadedAt >= (waiting ? WAITING_REFRESH_MS : IDLE_REFRESH_MS)) refresh();
  }

  ready();
  setConnection("connecting");
  connect();
  setInterval(() => {
    tick();
    keepFresh();
  }, 1000);
})();
