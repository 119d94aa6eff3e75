'use client'
import { useEffect, useState } from 'react'
import { message } from './message'

export default function Page() {
  const [at, setAt] = useState('')
  useEffect(() => setAt(location.host), [])
  return <main><h1>Served by Next in a sandbox</h1><p>Address {at}</p><p>Message {message}</p></main>
}
