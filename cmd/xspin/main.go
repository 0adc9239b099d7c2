// SPDX-License-Identifier: Apache-2.0

// Command xspin is the XsPIN SmartNIC and what belongs to it.
package main

import (
	"github.com/xspin/xspin/cli"
	"github.com/xspin/xspin/eval"
)

func main() { cli.Main(eval.Commands()...) }
