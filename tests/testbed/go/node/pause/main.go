// The process of a pod's sandbox: it holds the namespaces, and buries whom it inherits.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	asked := make(chan os.Signal, 8)
	signal.Notify(asked, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range asked {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if child, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); child <= 0 || err != nil {
				break
			}
		}
	}
}
