// SPDX-License-Identifier: Apache-2.0

package datatypes

import "context"

type serveAsk struct{}
type Message struct{}

func (a *application) serve(ctx context.Context, q *serveAsk, t *terminal) error { return nil }
