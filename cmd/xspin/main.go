// SPDX-License-Identifier: Apache-2.0

// Command xspin is the XsPIN SmartNIC and what belongs to it.
package main

import "github.com/xspin/xspin/cli"

func main() { cli.Main() }
