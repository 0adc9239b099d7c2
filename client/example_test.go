// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"bytes"
	"context"
	"fmt"

	"github.com/xspin/xspin/client"
	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
)

// An application that takes one message after the other, and answers what handlers ask.
func Example() {
	ctx := context.Background()
	app, err := client.Attach(ctx, "inbox", client.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer app.Close()
	in := app.Window("in")
	next := control.Receive{Window: "in", Size: in.Size(), Ignore: ^uint32(0)} // any message, to the start
	if err := app.Post(ctx, next); err != nil {
		fmt.Println(err)
		return
	}
	var e hostq.Event
	var c hostq.Call
	for {
		for app.Event(&e) {
			fmt.Printf("%d bytes from %v: %q\n", e.Length, e.Source, in.Bytes()[:e.Length])
			if err := app.Post(ctx, next); err != nil {
				fmt.Println(err)
			}
		}
		for app.Request(&c) {
			if err := app.Respond(&c, 0, bytes.ToUpper(c.Payload)); err != nil {
				fmt.Println(err)
			}
		}
		if err := app.Wait(ctx); err != nil {
			fmt.Println(err) // an *EndedError, if the daemon has ended it
			return
		}
	}
}
