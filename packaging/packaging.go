// Package packaging holds the systemd units, for make install and shard setup alike. @PREFIX@ stands for where the programs
// are, @ROOT@ for the data directory.
package packaging

import _ "embed"

// Daemon is the unit of the daemon.
//
//go:embed shard.service
var Daemon string

// Serve is the unit of shard serve, which runs as user shard.
//
//go:embed shard-serve.service
var Serve string
