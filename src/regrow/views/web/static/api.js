// Requests for data, with the token that the address of the page contained.

const KEY = "regrow-token";

/** Move the token from the address of the page to the storage of this page's origin. */
export function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEY, decodeURIComponent(found[1]));
    history.replaceState(null, "", location.pathname + "#/");
  }
}

/** Use another token, which the reader typed. */
export function setToken(token) {
  sessionStorage.setItem(KEY, token.trim());
}

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function request(path, signal) {
  const token = sessionStorage.getItem(KEY) ?? "";
  const response = await fetch(`api/${path}`, {
    headers: { Authorization: `Bearer ${token}` },
    signal,
  });
  if (!response.ok) {
    const { error = response.statusText } = await response.json().catch(() => ({}));
    throw new Refused(response.status, error);
  }
  return response;
}

/** Return the data at a path. */
export async function get(path) {
  return (await request(path)).json();
}

/**
 * Call `onData` with each message of a stream, and connect again when the connection is lost.
 *
 * @param onLink called with "live", or with "lost" and the error
 * @returns a function that ends the stream
 */
export function follow(path, onData, onLink) {
  const stop = new AbortController();
  const run = async () => {
    for (let pause = 250; !stop.signal.aborted; pause = Math.min(pause * 2, 5000)) {
      try {
        const response = await request(path, stop.signal);
        onLink("live");
        pause = 250;
        for await (const data of messages(response.body)) onData(data);
        onLink("lost", new Error("the server ended the connection"));
      } catch (error) {
        if (stop.signal.aborted) return;
        onLink("lost", error);
        if (error instanceof Refused && error.status < 500) return;
      }
      await new Promise((done) => setTimeout(done, pause));
    }
  };
  run();
  return () => stop.abort();
}

async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (unread + value).split("\n\n");
    unread = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}
