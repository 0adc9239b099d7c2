// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/internal/flags"
)

// newLogCmd returns `xspin log`.
func newLogCmd() *cobra.Command {
	var hpu int
	var follow, asJSON bool
	cmd := &cobra.Command{
		Use:   "log CONTEXT",
		Short: "What the handlers of a context print",
		Long: `Print the last lines that the handlers of one of the daemon's contexts have
logged, of all HPUs or of one. The daemon keeps the last 1024 of each HPU
(log.lines in its configuration) in memory; with log.dir it also writes them to files.

An HPU may log 10000 lines a second (log.rate), in a burst or evenly. Lines beyond
that are not kept, but counted: the next line says how many are missing. With -f,
lines are printed as they are logged; below the rate none is missing unless the
reader is more than a second late.

With --json each line is a JSON document: seq (from 1, of the HPU's lines), time,
hpu, text and lost (lines that are missing before this one).`,
		Example: `  xspin log inbox
  xspin log inbox --hpu 2 -f
  xspin log inbox -f --json | jq -r .text`,
		Args: wantArgs("CONTEXT"),
	}
	cmd.Flags().IntVar(&hpu, "hpu", -1, "only lines of this HPU (default all)")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "keep printing new lines, until Ctrl-C")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON document for each line")
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if hpu < -1 {
			return fmt.Errorf("log: %w", flags.Error("hpu", hpu, "want 0 or more"))
		}
		c, err := dial()
		if err != nil {
			return err
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
		defer stop()
		out := cmd.OutOrStdout()
		enc := json.NewEncoder(out)
		enc.SetEscapeHTML(false)
		lines := 0
		err = c.Log(ctx, args[0], hpu, follow, func(l control.LogLine) error {
			lines++
			if asJSON {
				return enc.Encode(l)
			}
			at := l.Time.Local().Format(time.StampMicro)
			if l.Lost > 0 {
				if _, err := fmt.Fprintf(out, "%s hpu=%d (%s)\n", at, l.HPU, lostLines(l.Lost)); err != nil {
					return err
				}
			}
			_, err := fmt.Fprintf(out, "%s hpu=%d %s\n", at, l.HPU, l.Text)
			return err
		})
		if err != nil && !(errors.Is(err, context.Canceled) && ctx.Err() != nil) {
			return fmt.Errorf("log %s: %w", args[0], err)
		}
		if lines == 0 && !follow && isTerminal(out) { // not into a pipe, where only log lines are wanted
			fmt.Fprintln(cmd.ErrOrStderr(), "nothing logged yet")
		}
		return nil
	}
	return cmd
}

func lostLines(n uint64) string {
	if n == 1 {
		return "1 line lost"
	}
	return fmt.Sprintf("%d lines lost", n)
}
