// SPDX-License-Identifier: Apache-2.0

// Command xspin is the XsPIN SmartNIC and what belongs to it.
package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
)

func main() {
	if err := newRootCmd().Execute(); err != nil {
		fmt.Fprintf(os.Stderr, "xspin: %v\n", err)
		os.Exit(1)
	}
}

// newRootCmd returns the whole command line.
func newRootCmd() *cobra.Command {
	root := &cobra.Command{
		Use:   "xspin",
		Short: "A sPIN SmartNIC in software",
		Long: `XsPIN turns a network interface into a SmartNIC that runs small handlers on
every matching packet, and leaves all other traffic to Linux.

Every flag can also come from the environment or from a file, in this order:
  1. the command line                 --count 100
  2. XSPIN_ and the command and flag  XSPIN_DEMO_PINGPONG_COUNT=100
  3. the configuration file           demo: {pingpong: {count: 100}}
The file is given with --config or XSPIN_CONFIG, else it is /etc/xspin.yaml if
that is there.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	file := root.PersistentFlags().String("config", "", "configuration file (YAML, TOML or JSON)")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error { return configure(cmd, *file) }

	demo := &cobra.Command{Use: "demo", Short: "Demonstrations: what to look at first, and to imitate"}
	demo.AddCommand(newPingpongCmd())
	root.AddCommand(demo, newLabCmd(), newRulesCmd(), newStatsCmd(), newBenchCmd())
	root.AddCommand(newHelperCmds()...)
	root.AddCommand(newBenchHelperCmds()...)
	for _, group := range root.Commands() {
		if group.HasSubCommands() && !group.Runnable() {
			// Cobra would show help, and succeed, for a misspelt subcommand.
			group.Args, group.RunE = cobra.NoArgs, root.RunE
		}
	}
	return root
}

// defaultConfig is read if it is there.
const defaultConfig = "/etc/xspin.yaml"

// configure gives the flags that were not typed the values that environment and
// file have for them.
func configure(cmd *cobra.Command, file string) error {
	if cmd.DisableFlagParsing {
		return nil // processes that we start ourselves
	}
	v := viper.New()
	v.SetEnvPrefix("XSPIN")
	v.SetEnvKeyReplacer(strings.NewReplacer(".", "_", "-", "_"))
	if file == "" {
		file = os.Getenv("XSPIN_CONFIG")
	}
	optional := file == ""
	if optional {
		file = defaultConfig
	}
	v.SetConfigFile(file)
	if err := v.ReadInConfig(); err != nil && !(optional && errors.Is(err, fs.ErrNotExist)) {
		return fmt.Errorf("configuration file %s: %w", file, err)
	}
	path := strings.ReplaceAll(strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" "), " ", ".")
	var errs []error
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		key := path + "." + f.Name
		if f.Changed || f.Name == "help" {
			return
		}
		_ = v.BindEnv(key) // fails for an empty key only
		if !v.IsSet(key) {
			return
		}
		value := v.GetString(key)
		if strings.HasSuffix(f.Value.Type(), "Slice") {
			if list := v.GetStringSlice(key); len(list) > 1 {
				value = strings.Join(list, ",")
			}
		}
		if err := cmd.Flags().Set(f.Name, value); err != nil {
			errs = append(errs, fmt.Errorf("%s (environment or %s): %w", key, file, err))
		}
	})
	return errors.Join(errs...)
}
