// The browser's storage as strings. It may be blocked or full: then nothing is found, and `write` returns false.

export const local = guarded("localStorage");
export const session = guarded("sessionStorage"); // of this tab

function guarded(name) {
  const attempt = (work, otherwise) => {
    try {
      return work(window[name]); // blocked storage throws already here
    } catch {
      return otherwise;
    }
  };
  return {
    read: (key) => attempt((storage) => storage.getItem(key), null),
    write: (key, value) => attempt((storage) => (storage.setItem(key, value), true), false),
    remove: (key) => attempt((storage) => storage.removeItem(key), undefined),
    keys: () => attempt((storage) => Object.keys(storage), []),
  };
}
