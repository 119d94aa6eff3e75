/// <reference lib="esnext.disposable" preserve="true" />

/**
 * Symbol.asyncDispose, or on a Node before 20.5, which lacks it, a symbol of our own: nobody's globals are changed, and
 * `await using` needs the global anyway.
 */
export const asyncDispose: typeof Symbol.asyncDispose =
  Symbol.asyncDispose ?? (Symbol.for("Symbol.asyncDispose") as typeof Symbol.asyncDispose);
