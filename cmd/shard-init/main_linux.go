// Command shard-init is PID 1 of every sandbox; package agent is all of it.
package main

import "github.com/useshards/shard/internal/guest/agent"

func main() { agent.Main() }
