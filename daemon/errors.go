// SPDX-License-Identifier: Apache-2.0

package daemon

import "errors"

// What is wrong with a request. Errors wrap one of these for the server to tell what
// status it answers.
var (
	errNotFound = errors.New("there is no such thing")
	errDenied   = errors.New("not allowed")
	errBusy     = errors.New("busy")
	errInvalid  = errors.New("invalid")
)
