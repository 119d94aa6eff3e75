// Nothing about hosts or origins: what Vite allows by itself is what a preview shows it.
export default {
  server: { port: 5173, strictPort: true, proxy: { '/echo': { target: 'ws://127.0.0.1:8000', ws: true } } },
}
