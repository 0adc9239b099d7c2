// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"regexp"
	"strings"
)

// A caller is how this process was started, and so how the user starts the next one.
type caller struct {
	name string // the program, as it was typed
	root bool   // by root
	sudo bool   // with sudo
}

func calledBy() caller {
	root := os.Geteuid() == 0
	return caller{os.Args[0], root, root && os.Getenv("SUDO_COMMAND") != ""}
}

// hint returns a command line of this program that can be pasted.
func hint(args string) string { return calledBy().line(args) }

func (c caller) line(args string) string {
	line := c.name + " " + args
	if c.sudo {
		return "sudo " + line
	}
	return line
}

var quoted = regexp.MustCompile("`(sudo )?xspin( [^`]*)`")

// rewrite changes the command lines in a message, which are quoted as in `xspin lab up`, to
// call the program in the same way as this process was called.
func (c caller) rewrite(message string) string {
	return quoted.ReplaceAllStringFunc(message, func(s string) string {
		m := quoted.FindStringSubmatch(s)
		asks := m[1] != "" && !c.root // it needs sudo, as this user is not root
		return "`" + caller{c.name, c.root, c.sudo || asks}.line(strings.TrimSpace(m[2])) + "`"
	})
}
