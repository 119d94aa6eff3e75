// Command lookup-go is the resolver of Go in the image of clients; see lookup.c.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var err error
	if os.Args[1] == "txt" {
		var texts []string
		texts, err = net.DefaultResolver.LookupTXT(ctx, os.Args[2])
		size := 0
		for _, t := range texts {
			size += len(t)
		}
		if err == nil {
			fmt.Println(size)
		}
	} else {
		var addrs []string
		addrs, err = net.DefaultResolver.LookupHost(ctx, os.Args[2])
		slices.Sort(addrs)
		for _, a := range addrs {
			fmt.Println(a)
		}
	}
	if e, ok := errors.AsType[*net.DNSError](err); ok && e.IsNotFound {
		fmt.Println("no-name")
	} else if err != nil {
		fmt.Println("failed:", err)
	}
}
