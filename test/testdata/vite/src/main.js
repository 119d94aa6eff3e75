import { message } from './message.js'

const show = (id, text) => { document.getElementById(id).textContent = text }
show('address', location.host)
show('module', message)
if (import.meta.hot) {
  import.meta.hot.accept('./message.js', (m) => { show('module', m.message); show('hot', 'updated') })
  import.meta.hot.on('vite:ws:connect', () => show('hot', 'connected'))
}
const ws = new WebSocket(location.origin.replace('http', 'ws') + '/echo')
ws.onopen = () => ws.send('hello through shard')
ws.onmessage = (e) => show('echo', 'echo: ' + e.data)
