// Repeats work that a busy service refuses.

function pause(wait_s, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, wait_s * 1e3);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

// Calls work() up to `tries` times. waitOf(error, attempt) returns the seconds until the next try; 0
// throws the error instead.
export async function withRetries(work, tries, waitOf, signal) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      return await work();
    } catch (error) {
      const wait_s = attempt < tries ? waitOf(error, attempt) : 0;
      if (!wait_s) throw error;
      await pause(wait_s, signal);
    }
  }
}
