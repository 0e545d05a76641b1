// How the page reaches the service. It loads nothing from elsewhere.
"use strict";

// The parts of a stream of server-sent events that has come so far, for where there is no EventSource.
function parser(on) {
  let text = "";
  return (chunk) => {
    text += chunk;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      let name = "message", data = [];
      for (const line of part.split("\n")) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (data.length && on[name]) on[name](data.join("\n"));
    }
  };
}

// Ways to the service, each with the JSON of a path and a stream of what is new; `on` has what takes each kind, and `opened`,
// `lost` and `saved`. The page uses no other.
const transports = {
  // Where the page came from.
  http: {
    async json(path) {
      const answer = await fetch(path);
      const value = await answer.json();
      if (!answer.ok) throw new Error(value.error);
      return value;
    },
    stream(on) {
      const source = new EventSource("v1/events");
      source.onopen = on.opened;
      // EventSource tries again by itself unless the answer was no stream.
      source.onerror = () => { on.lost(); if (source.readyState === EventSource.CLOSED) setTimeout(() => this.stream(on), 2000); };
      for (const name of ["status", "observation", "event"]) source.addEventListener(name, (message) => on[name](message.data));
    },
  },
  // Inside Cockpit, which forwards to the socket with the rights of the session.
  cockpit: {
    socket: () => window.cockpit.http({ unix: "/run/rtvirtio/rtvirtiod.sock", superuser: "try" }),
    async text(path) {
      try {
        return await this.socket().get("/" + path);
      } catch (error) {
        throw new Error(error.message || String(error));
      }
    },
    async json(path) { return JSON.parse(await this.text(path)); },
    stream(on) {
      const take = parser(on), socket = this.socket();
      let isOpen = false, isOver = false, silence;
      const again = () => {
        if (isOver) return;
        isOver = true;
        clearTimeout(silence);
        on.lost();
        setTimeout(() => this.stream(on), 2000);
      };
      // Cockpit does not end a stream whose service has died: one that lives says so each 5 s.
      const wait = () => { clearTimeout(silence); silence = setTimeout(() => { again(); socket.close(); }, 12000); };
      wait();
      socket.get("/v1/events").stream((data) => { if (isOver) return; wait(); if (!isOpen) { isOpen = true; on.opened(); } take(data); }).then(again, again);
    },
  },
  // A copy of the page with what was known when it was saved.
  copy: {
    saved: null,
    async json(path) {
      if (path === "v1/history") return this.saved.history;
      const settings = this.saved.settings[decodeURIComponent(path.split("/")[2])];
      if (!settings) throw new Error("this is not in the copy");
      if (settings.error) throw new Error(settings.error);
      return settings;
    },
    stream(on) {
      on.status(JSON.stringify(this.saved.status));
      on.observation(JSON.stringify(this.saved.observation));
      on.saved(this.saved.time);
    },
  },
};

function chosenTransport() {
  // Data within the page, Cockpit's library, or neither.
  const saved = document.getElementById("saved");
  if (saved) {
    transports.copy.saved = JSON.parse(saved.textContent);
    return transports.copy;
  }
  return window.cockpit ? transports.cockpit : transports.http;
}

const transport = chosenTransport();
